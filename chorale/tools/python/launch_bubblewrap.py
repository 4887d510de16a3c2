"""Bubblewrap: separate namespaces, a read-only system, size-limited tmpfs, a system-call filter.

A server that runs as root starts it as another user: "nobody" inside would otherwise be root outside, which
the kernel checks for files in /proc.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

from chorale.tools.python.launch import (
    FILTER_FD,
    GUEST,
    NOBODY,
    SHARED_MEMORY_BYTES,
    SandboxLaunch,
    SandboxLimits,
    guest_limits,
)
from chorale.tools.python.seccomp import deny_list

# Kernel settings in /proc, read-only regardless of the outer user's rights.
_PROC_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "tty", "mtrr", "asound")
# An intermediate program, since uvloop cannot start processes as another user. It imports nothing after the
# change of user, who may be unable to read the library.
_BECOME = f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
_AS_NOBODY = f"import os, sys; {_BECOME}; os.execve(sys.argv[1], sys.argv[1:], dict())"


def bubblewrap(limits: SandboxLimits) -> SandboxLaunch | None:
    """Returns the start, or None if the server is root and other users can read no interpreter."""
    as_root = os.geteuid() == 0
    python = _interpreter(for_others=as_root)
    if python is None:
        return None
    base = python.parent.parent
    call_filter = deny_list(network=limits.network)
    program = [
        *((sys.executable, "-I", "-S", "-c", _AS_NOBODY) if as_root else ()),
        shutil.which("bwrap") or "bwrap", *(("--seccomp", FILTER_FD) if call_filter else ()),
        "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent",
        "--new-session", "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox",
        "--cap-drop", "ALL", "--clearenv", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8",
        "--setenv", "PATH", f"{base}/bin:/usr/bin:/bin",
    ]  # fmt: skip
    argv = [*program, *_system(base), *_devices_and_files(limits)]
    if limits.network:
        argv += ["--share-net", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
        argv += ["--ro-bind-try", "/etc/ssl", "/etc/ssl", "--ro-bind-try", "/etc/hosts", "/etc/hosts"]
    argv += ["--remount-ro", "/", "--chdir", "/mnt/data"]
    argv += [str(python), "-I", "-u", "-X", "utf8", "-c", GUEST.read_text("utf-8")]
    argv.append(guest_limits(limits, processes=True, own_pids=True))
    return SandboxLaunch(
        tuple(argv),
        {},  # empty, since code in the sandbox could read the environment of process 1
        watch_bytes=limits.memory_bytes,
        call_filter=call_filter,
    )


def _system(base: Path) -> list[str]:
    argv = ["--ro-bind", "/usr", "/usr"]
    for path in ("/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives"):
        argv += ["--ro-bind-try", path, path]
    if not base.is_relative_to("/usr"):
        argv += ["--ro-bind", str(base), str(base)]
    return argv


def _devices_and_files(limits: SandboxLimits) -> list[str]:
    """Returns options for devices and files. /dev is an unlimited tmpfs and thus remounted read-only."""
    argv = ["--proc", "/proc"]
    for name in _PROC_READ_ONLY:
        argv += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    argv += [
        "--dev",
        "/dev",
        "--size",
        str(SHARED_MEMORY_BYTES),
        "--tmpfs",
        "/dev/shm",
        "--remount-ro",
        "/dev",
    ]
    for path in ("/tmp", "/mnt/data"):
        argv += ["--size", str(limits.disk_bytes), "--tmpfs", path]
    return argv


def _interpreter(*, for_others: bool) -> Path | None:
    """Returns this server's interpreter, or the system's if the sandbox's user cannot read the former."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = Path(os.path.realpath(sys.base_prefix)) / "bin" / name
    if not for_others or _readable_by_others(own):
        return own
    system = Path(os.path.realpath("/usr/bin/python3"))
    return system if _readable_by_others(system) else None


def _readable_by_others(program: Path) -> bool:
    try:
        modes = [os.stat(path).st_mode for path in (program, *program.parents)]
    except OSError:
        return False
    return all(mode & stat.S_IXOTH for mode in modes)
