"""How every command says what went wrong."""

from __future__ import annotations

import sys


def print_error(message: str) -> None:
    """On stderr, where it is seen when stdout is a file or a pipe."""
    print(f"chorale: error: {message}", file=sys.stderr)
