"""How an interpreter is started, and what every kind of sandbox needs for it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NOBODY = 65534  # user and group of the code, inside and, where the server may choose, outside
GUEST = Path(__file__).with_name("guest.py")
FILTER_FD = "{filter}"
SHARED_MEMORY_BYTES = 2**20  # of /dev/shm


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Of one session; time is of one call."""

    seconds: float = 120.0
    memory_bytes: int = 2**30
    num_processes: int = 64
    disk_bytes: int = 256 * 2**20  # of each of /tmp and /mnt/data; WebAssembly: of both together
    output_bytes: int = 64 * 1024  # what is kept of a call's output
    network: bool = False


@dataclass(frozen=True, slots=True)
class SandboxLaunch:
    """A started interpreter is ``argv`` with the guest's protocol on its pipes."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str | None = None  # a private working directory that the caller makes and removes
    kill_argv: tuple[str, ...] = ()  # run when the process ends: the container may outlive its client
    watch_bytes: int | None = None  # what the host allows the processes and their tmpfs together
    call_filter: bytes | None = None  # a system-call filter; FILTER_FD in argv becomes the number of its pipe
    own_timer: bool = True  # whether the interpreter ends a call itself and keeps the variables
    start_seconds: float = 30.0


def guest_limits(limits: SandboxLimits, *, processes: bool, own_pids: bool) -> str:
    """``own_pids``: every process that the guest sees is of its session, so that it may end them all."""
    return json.dumps(
        {
            "memory_bytes": limits.memory_bytes,
            "num_processes": limits.num_processes if processes else None,
            "file_bytes": limits.disk_bytes,
            "num_files": 256,
            "own_pids": own_pids,
        }
    )


def client_environment() -> dict[str, str]:
    """What a container client or uv needs, and no secret of this server."""
    wanted = ("PATH", "HOME", "LANG", "DOCKER_HOST", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR", "CONTAINER_HOST")
    return {name: os.environ[name] for name in wanted if name in os.environ}
