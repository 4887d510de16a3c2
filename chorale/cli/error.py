"""The form of error messages of all commands."""

from __future__ import annotations

import sys


def print_error(message: str) -> None:
    """Prints to stderr, so that the message is visible if stdout is a file or a pipe."""
    print(f"chorale: error: {message}", file=sys.stderr)
