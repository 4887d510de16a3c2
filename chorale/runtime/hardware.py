"""Hardware: the few numbers about a machine that decide sizes. Torch-free, so that the CLI can use it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Hardware:
    """``total_bytes`` and ``free_bytes`` are of the memory that holds weights and KV pages."""

    kind: Literal["cpu", "cuda"]
    name: str
    total_bytes: int
    free_bytes: int


def cpu_count() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def available_memory() -> int:
    """Bytes of host memory that this process could still take: what the kernel says, within its cgroup."""
    limit = _cgroup_room()
    available = _meminfo_available()
    return available if limit is None else min(available, limit)


def _meminfo_available() -> int:
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_room() -> int | None:
    """Bytes left under the version 2 memory limit of this process's cgroup; None where there is none.

    Inactive file pages (read weights, say) count as usage there, and are given up when memory is short.
    """
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text("ascii").strip()
        if limit == "max":
            return None
        usage = int((group / "memory.current").read_text("ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        return max(int(limit) - usage + int(stat.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return None
