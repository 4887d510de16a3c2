"""The start of a sandboxed interpreter: its description, and a function for each kind but bubblewrap."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chorale.machine.processes import module_command

NOBODY = 65534  # user and group of the code inside the sandbox and, if the server may choose, outside
GUEST = Path(__file__).with_name("guest.py")
FILTER_FD = "{filter}"
SHARED_MEMORY_BYTES = 2**20  # size of /dev/shm
_RUNTIME_BYTES = 96 * 2**20  # WebAssembly: the process without the code's memory and files: 60 MiB measured


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


def container(kind: str, limits: SandboxLimits, name: str, image: str) -> SandboxLaunch:
    """Returns the start in docker, podman or docker with gVisor, without privileges or persistent files.

    The container's cgroup counts tmpfs and shared memory like its processes.
    """
    program = "podman" if kind == "podman" else "docker"
    disk = f"rw,nosuid,nodev,size={limits.disk_bytes}"
    argv = [
        program, "run", "--rm", "--interactive", "--init", "--name", name, "--pull", "never",
        "--network", "bridge" if limits.network else "none", "--ipc", "private",
        "--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes),
        "--pids-limit", str(limits.num_processes), "--cpus", "1", "--shm-size", str(SHARED_MEMORY_BYTES),
        "--ulimit", "core=0:0", "--ulimit", "nofile=256:256",
        "--read-only", "--tmpfs", f"/tmp:{disk},mode=1777", "--tmpfs", f"/mnt/data:{disk},mode=1777",
        "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{NOBODY}:{NOBODY}",
        "--log-driver", "none", "--hostname", "sandbox", "--env", "HOME=/tmp", "--workdir", "/mnt/data",
    ]  # fmt: skip
    if kind == "gvisor":
        argv += ["--runtime", "runsc"]
    argv += [image, "python", "-I", "-u", "-X", "utf8", "-c", GUEST.read_text("utf-8")]
    argv.append(guest_limits(limits, processes=False, own_pids=True))
    return SandboxLaunch(tuple(argv), client_environment(), kill_argv=(program, "kill", name))


def wasm(limits: SandboxLimits) -> SandboxLaunch:
    """Returns the start of CPython on WebAssembly, in a process that drops its privileges before it receives
    code."""
    start = {
        "parent_pid": os.getpid(),
        "memory_bytes": limits.memory_bytes,
        "disk_bytes": min(limits.disk_bytes, limits.memory_bytes // 2),
        "arguments": [
            "python", "-I", "-u", "-X", "utf8", "-c", GUEST.read_text("utf-8"),
            guest_limits(limits, processes=False, own_pids=False),
        ],
        "environment": {"HOME": "/tmp", "LANG": "C.UTF-8"},
    }  # fmt: skip
    argv = (*module_command("chorale.tools.python.wasm.host"), json.dumps(start))
    wanted = ("HOME", "XDG_CACHE_HOME", "TMPDIR")  # they determine where the compiled interpreter is cached
    environment = {name: os.environ[name] for name in wanted if name in os.environ}
    return SandboxLaunch(
        argv,
        environment,
        watch_bytes=limits.memory_bytes + _RUNTIME_BYTES,
        own_timer=False,
        start_seconds=600.0,  # the first start compiles, at low priority
    )


def uv(limits: SandboxLimits, directory: str) -> SandboxLaunch:
    """Returns the start of an ordinary process of this user with limits but without isolation."""
    argv = (
        "uv", "run", "--no-project", "--no-config", "--offline", "--python", sys.executable, "--quiet",
        "python", "-I", "-u", "-X", "utf8", str(GUEST), guest_limits(limits, processes=False, own_pids=False),
    )  # fmt: skip
    environment = client_environment() | {"HOME": directory}
    return SandboxLaunch(argv, environment, directory, watch_bytes=limits.memory_bytes)
