"""Processes that a test has started, and those that they start."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def children(pid: int, program: str = "") -> set[int]:
    """Processes that ``pid`` has started and not yet waited for, from any of its threads.

    ``program``: only those whose command line has this text.
    """
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found.update(map(int, task.read_text().split()))
    return {child for child in found if program in command_line(child)}


def command_line(pid: int) -> str:
    """Empty for a process that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, without that of its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def exists(pid: int) -> bool:
    """Whether there is such a process, also if it has ended and nobody has waited for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    """Processes that ``pid`` has started, and those that they have started."""
    return [found for child in sorted(children(pid)) for found in (child, *descendants(child))]


def is_running(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
