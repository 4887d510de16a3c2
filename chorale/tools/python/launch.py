"""The description of a sandboxed interpreter's start, common to all kinds of sandbox."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NOBODY = 65534  # user and group of the code inside the sandbox and, if the server may choose, outside
GUEST = Path(__file__).with_name("guest.py")
FILTER_FD = "{filter}"
SHARED_MEMORY_BYTES = 2**20  # size of /dev/shm


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of a session; ``seconds`` limits a call."""

    seconds: float = 120.0
    memory_bytes: int = 2**30
    num_processes: int = 64
    disk_bytes: int = 256 * 2**20  # /tmp and /mnt/data each; WebAssembly: both together
    output_bytes: int = 64 * 1024  # kept output of a call
    network: bool = False


@dataclass(frozen=True, slots=True)
class SandboxLaunch:
    """The start of an interpreter: ``argv`` runs the guest, with its protocol on the pipes."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str | None = None  # a private working directory that the caller creates and removes
    kill_argv: tuple[str, ...] = ()  # run when the process ends, since the container may outlive its client
    watch_bytes: int | None = None  # memory limit of the processes and their tmpfs together
    call_filter: bytes | None = None  # a system-call filter; FILTER_FD in argv becomes the number of its pipe
    # Whether the interpreter itself ends a call that timed out and keeps the variables.
    own_timer: bool = True
    start_seconds: float = 30.0


def guest_limits(limits: SandboxLimits, *, processes: bool, own_pids: bool) -> str:
    """Returns the guest's limits as JSON.

    ``own_pids``: the guest sees only its own processes and may end all.
    """
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
    """Returns the environment that a container client or uv needs, without the server's secrets."""
    wanted = ("PATH", "HOME", "LANG", "DOCKER_HOST", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR", "CONTAINER_HOST")
    return {name: os.environ[name] for name in wanted if name in os.environ}
