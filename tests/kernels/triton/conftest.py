"""``CHORALE_TWINS_EVERY=n``: of the cases of each test in ``*twins*.py`` only every n-th runs.

Then tests marked ``slow`` do not run: each takes the interpreter many seconds, and others run its kernels.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support.kernels.interpreter import look_up_once

    look_up_once()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = int(os.environ.get("CHORALE_TWINS_EVERY", "1"))
    cases: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "twins" in item.path.name:
            cases[item.path.name, getattr(item, "originalname", item.name)].append(item)
    left_out = {item for of_one in cases.values() for item in of_one if of_one.index(item) % every}
    if every > 1:
        left_out |= {item for item in items if item.get_closest_marker("slow")}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
