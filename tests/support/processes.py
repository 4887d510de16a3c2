"""Processes that a test has started, and those that they start."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def children(pid: int) -> set[int]:
    """Processes that ``pid`` has started and not yet waited for, from any of its threads."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found.update(map(int, task.read_text().split()))
    return found


def exists(pid: int) -> bool:
    """Whether there is such a process, also if it has ended and nobody has waited for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
