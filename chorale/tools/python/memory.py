"""Memory use of a process and its descendants, from /proc. Zero without /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_MAX_PROCESSES = 4096
_TMPFS = ("tmp", "mnt/data", "dev/shm")
_INODE_BYTES = 1024  # kernel memory of a file with its name, approximately
_SOCKET_BYTES = 512 * 1024  # above the default buffer of a local socket (208 KiB)


def tree_bytes(pid: int) -> int:
    """Returns the memory in use. Pages that forked processes share count once (proportional set size).

    Includes files in the sandbox's tmpfs and socket buffers, which no process's count includes.
    """
    waiting, total, seen = [pid], 0, 0
    sockets: set[str] = set()
    outside = _root_of(os.getpid())
    inside: set[tuple[int, int]] = set()
    while waiting and seen < _MAX_PROCESSES:
        current = waiting.pop()
        seen += 1
        try:
            for task in os.listdir(f"/proc/{current}/task"):
                waiting += [int(p) for p in Path(f"/proc/{current}/task/{task}/children").read_text().split()]
            total += _own_bytes(current)
            sockets |= _sockets(current)
            root = _root_of(current)
            if root != outside and root not in inside:
                inside.add(root)
                total += _tmpfs_bytes(current)
        except (OSError, ValueError, IndexError):
            continue  # the process has ended
    return total + len(sockets) * _SOCKET_BYTES


def _sockets(pid: int) -> set[str]:
    found = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # it has been closed
            found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return {name for name in found if name.startswith("socket:")}


def _own_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except PermissionError:
        pass
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _root_of(pid: int) -> tuple[int, int]:
    """Identifies the root file system of a process: the sandbox's differs from the server's."""
    status = os.stat(f"/proc/{pid}/root")
    return status.st_dev, status.st_ino


def _tmpfs_bytes(pid: int) -> int:
    """Returns the size of the contents plus the kernel's overhead per file."""
    total, seen = 0, set()
    for folder in _TMPFS:
        path = f"/proc/{pid}/root/{folder}"
        try:
            device, status = os.stat(path).st_dev, os.statvfs(path)
        except OSError:
            continue
        if device not in seen:
            seen.add(device)
            total += (status.f_blocks - status.f_bfree) * status.f_frsize
            total += (status.f_files - status.f_ffree) * _INODE_BYTES
    return total
