"""Suggestions for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from chorale.errors import ConfigError


def nearest(given: str, names: Iterable[str], dashes: str = "") -> str:
    """Returns ``; did you mean A or B?`` or an empty string. Names with ``given`` as a prefix come first."""
    known = list(dict.fromkeys(names))
    begun = sorted(name for name in known if given and name.startswith(given))
    near = begun or difflib.get_close_matches(given, known, n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(dashes + name for name in near[:2])}?" if near else ""


def subcommand(given: str, known: Collection[str], what: str, usage: str) -> ConfigError:
    """Returns the error for an unknown subcommand. Its message contains the first line of ``usage``."""
    return ConfigError(f"unknown {what} {given!r}{nearest(given, known)} ({usage.splitlines()[0]})")
