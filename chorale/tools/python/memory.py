"""Memory of a process and everything below it, from /proc. Zero where there is no /proc."""

from __future__ import annotations

import os
from pathlib import Path

_MAX_PROCESSES = 4096


def tree_bytes(pid: int) -> int:
    """Memory in use; a page that forked processes share is counted once (proportional set size)."""
    waiting, total, seen = [pid], 0, 0
    while waiting and seen < _MAX_PROCESSES:
        current = waiting.pop()
        seen += 1
        try:
            for task in os.listdir(f"/proc/{current}/task"):
                waiting += [int(p) for p in Path(f"/proc/{current}/task/{task}/children").read_text().split()]
            total += _own_bytes(current)
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
    return total


def _own_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except PermissionError:
        pass
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
