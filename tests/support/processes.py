"""Queries about processes that a test has started, and about their descendants."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def children(pid: int, program: str = "") -> set[int]:
    """Returns the child processes of ``pid`` that it has not yet waited for, from any of its threads.

    ``program``: only those whose command line has this text.
    """
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found.update(map(int, task.read_text().split()))
    return {child for child in found if program in command_line(child)}


def command_line(pid: int) -> str:
    """Returns the command line of a process, empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process in seconds, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def exists(pid: int) -> bool:
    """Returns whether a process exists; a zombie does."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    """Returns the child processes of ``pid``, their children, and so on."""
    return [found for child in sorted(children(pid)) for found in (child, *descendants(child))]


def is_running(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
