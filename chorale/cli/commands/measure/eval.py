"""``chorale eval``: passes its arguments to chorale-evals, a separate distribution (``evals/``).

It is separate because it has dependencies that the server does not need.
"""

from __future__ import annotations

import importlib
import importlib.util

from chorale.errors import ConfigError, evals_hint

PACKAGE = "chorale_evals"


def run(arguments: list[str]) -> int:
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(f"chorale eval needs chorale-evals, which is not installed: {evals_hint()}")
    return int(importlib.import_module(f"{PACKAGE}.main").main(arguments))
