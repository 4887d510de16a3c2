"""CPU quotas by control groups, for processes that should get only part of a core."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

PERIOD = 100_000  # microseconds
FIRST, SECOND = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def has_quotas() -> bool:
    """Returns whether this user may make a group with a quota."""
    try:
        with cpu_quota(100):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def cpu_quota(percent: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that limits a process and its later children to ``percent`` of a core."""
    is_first = (FIRST / "cpu.cfs_quota_us").exists()
    group = (FIRST if is_first else SECOND) / f"chorale-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        if is_first:
            (group / "cpu.cfs_quota_us").write_text(str(percent * PERIOD // 100))
        else:
            (group / "cpu.max").write_text(f"{percent * PERIOD // 100} {PERIOD}")
        yield lambda pid: _enter(group, pid)
    finally:
        for _ in range(100):  # fails until its last process has ended
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def _enter(group: Path, pid: int) -> None:
    descriptor = os.open(group / "cgroup.procs", os.O_WRONLY)
    os.write(descriptor, str(pid).encode())
    os.close(descriptor)
