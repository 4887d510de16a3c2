"""How an interpreter is started, for each kind of sandbox: an argument list, and how it is taken down.

Nothing here is decided by the model: code reaches the sandbox on the interpreter's standard input only.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

SandboxKind = Literal["docker", "podman", "gvisor", "bubblewrap", "dangerously_use_uv"]
KINDS: tuple[SandboxKind, ...] = ("gvisor", "docker", "podman", "bubblewrap", "dangerously_use_uv")
# "auto" tries these in order; what runs on the host without isolation is never chosen for anybody.
SAFE_KINDS: tuple[SandboxKind, ...] = ("gvisor", "docker", "podman", "bubblewrap")

DEFAULT_IMAGE = "python:3.11"
_UID = 65534
_GUEST = Path(__file__).with_name("guest.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Of one session; time is of one call."""

    seconds: float = 120.0
    memory_bytes: int = 2**30
    num_processes: int = 64
    disk_bytes: int = 256 * 2**20  # of each of /tmp and /mnt/data
    output_bytes: int = 64 * 1024  # what is kept of a call's output
    network: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """A started interpreter is ``argv`` with the guest's protocol on its pipes."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str | None = None  # a private working directory that the caller makes and removes
    kill_argv: tuple[str, ...] = ()  # run when the process ends: the container may outlive its client
    watch_memory: bool = False  # whether the host sums up the processes' memory itself


class SandboxMissing(Exception):
    """The sandbox cannot run here; the text says what to do about it."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    kind: SandboxKind
    limits: SandboxLimits
    image: str = DEFAULT_IMAGE

    def with_memory(self, memory_bytes: int | None) -> Sandbox:
        """Lower memory for one session; a request cannot raise it."""
        if memory_bytes is None or memory_bytes >= self.limits.memory_bytes:
            return self
        return replace(self, limits=replace(self.limits, memory_bytes=max(memory_bytes, 64 * 2**20)))

    def launch(self, name: str, directory: str) -> Launch:
        """``name``: unique, for the container; ``directory``: an empty one, used without isolation only."""
        if self.kind == "bubblewrap":
            return self._bubblewrap()
        if self.kind == "dangerously_use_uv":
            return self._uv(directory)
        return self._container(name)

    @property
    def describe(self) -> str:
        """For the banner."""
        limits = self.limits
        where = f", image {self.image}" if self.kind in ("docker", "podman", "gvisor") else ""
        network = "network on" if limits.network else "no network"
        text = f"{self.kind}{where}: {limits.seconds:g} s, {limits.memory_bytes // 2**20} MiB, {network}"
        return f"{text}; NOT isolated from this machine" if self.kind == "dangerously_use_uv" else text

    # ------------------------------------------------------------------ kinds

    def _guest_limits(self, *, processes: bool) -> str:
        """``own_pids``: every process that the guest sees is of its session, so that it may end them all."""
        limits = self.limits
        return json.dumps(
            {
                "memory_bytes": limits.memory_bytes,
                "num_processes": limits.num_processes if processes else None,
                "file_bytes": limits.disk_bytes,
                "num_files": 256,
                "own_pids": self.kind != "dangerously_use_uv",
            }
        )

    def _container(self, name: str) -> Launch:
        limits = self.limits
        program = "podman" if self.kind == "podman" else "docker"
        disk = f"rw,nosuid,nodev,size={limits.disk_bytes}"
        argv = [
            program, "run", "--rm", "--interactive", "--init", "--name", name, "--pull", "never",
            "--network", "bridge" if limits.network else "none",
            "--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes),
            "--pids-limit", str(limits.num_processes), "--cpus", "1",
            "--read-only", "--tmpfs", f"/tmp:{disk},mode=1777", "--tmpfs", f"/mnt/data:{disk},mode=1777",
            "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{_UID}:{_UID}",
            "--log-driver", "none", "--hostname", "sandbox", "--env", "HOME=/tmp", "--workdir", "/mnt/data",
        ]  # fmt: skip
        if self.kind == "gvisor":
            argv += ["--runtime", "runsc"]
        argv += [self.image, "python", "-I", "-u", "-X", "utf8", "-c", _GUEST.read_text("utf-8")]
        argv.append(self._guest_limits(processes=False))
        return Launch(tuple(argv), _client_environment(), kill_argv=(program, "kill", name))

    def _bubblewrap(self) -> Launch:
        limits, size = self.limits, str(self.limits.disk_bytes)
        base = os.path.realpath(sys.base_prefix)
        python = str(Path(base) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
        argv = [
            "bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent",
            "--new-session", "--uid", str(_UID), "--gid", str(_UID), "--hostname", "sandbox",
            "--cap-drop", "ALL", "--ro-bind", "/usr", "/usr", "--ro-bind-try", "/lib", "/lib",
            "--ro-bind-try", "/lib64", "/lib64", "--ro-bind-try", "/bin", "/bin",
            "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache",
            "--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--ro-bind", base, base,
            "--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/tmp",
            "--size", size, "--tmpfs", "/mnt/data", "--size", "1048576", "--tmpfs", "/dev/shm",
            "--ro-bind", str(_GUEST), "/guest.py", "--remount-ro", "/", "--chdir", "/mnt/data",
            "--clearenv", "--setenv", "HOME", "/tmp", "--setenv", "PATH", f"{base}/bin:/usr/bin:/bin",
            "--setenv", "LANG", "C.UTF-8",
        ]  # fmt: skip
        if limits.network:
            argv += ["--share-net", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
            argv += ["--ro-bind-try", "/etc/ssl", "/etc/ssl", "--ro-bind-try", "/etc/hosts", "/etc/hosts"]
        argv += [python, "-I", "-u", "-X", "utf8", "/guest.py", self._guest_limits(processes=True)]
        return Launch(tuple(argv), {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}, watch_memory=True)

    def _uv(self, directory: str) -> Launch:
        """A process of this user on this machine: limits, but no isolation. Named for what it is."""
        argv = (
            "uv", "run", "--no-project", "--no-config", "--offline", "--python", sys.executable, "--quiet",
            "python", "-I", "-u", "-X", "utf8", str(_GUEST), self._guest_limits(processes=False),
        )  # fmt: skip
        return Launch(argv, _client_environment() | {"HOME": directory}, directory, watch_memory=True)


def _client_environment() -> dict[str, str]:
    """What a container client or uv needs, and no secret of this server."""
    wanted = ("PATH", "HOME", "LANG", "DOCKER_HOST", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR", "CONTAINER_HOST")
    return {name: os.environ[name] for name in wanted if name in os.environ}


async def check_program(sandbox: Sandbox) -> None:
    """Whether the sandbox's program, daemon, runtime and image are there. Raises ``SandboxMissing``."""
    kind = sandbox.kind
    programs = {"bubblewrap": "bwrap", "dangerously_use_uv": "uv", "gvisor": "docker"}
    program = programs.get(kind, kind)
    remedies = {"bwrap": "apt install bubblewrap", "uv": "pip install uv"}
    if shutil.which(program) is None:
        remedy = remedies.get(program, f"install {program}")
        raise SandboxMissing(f"{kind}: {program} is not installed ({remedy})")
    if kind in ("bubblewrap", "dangerously_use_uv"):
        return
    code, text = await _ask(
        program, "info", "--format", "{{json .Runtimes}}" if kind == "gvisor" else "{{.ID}}"
    )
    if code != 0 and program != "podman":
        raise SandboxMissing(f"{kind}: the docker daemon does not answer ({_last_line(text)})")
    if kind == "gvisor" and "runsc" not in text:
        raise SandboxMissing("gvisor: docker has no runtime runsc (see gvisor.dev/docs/user_guide/install)")
    code, _ = await _ask(program, "image", "inspect", sandbox.image)
    if code != 0:
        raise SandboxMissing(
            f"{kind}: the image {sandbox.image} is not here ({program} pull {sandbox.image})"
        )


async def _ask(*argv: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=_client_environment(),
    )
    try:
        async with asyncio.timeout(10):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return 1, "no answer within 10 s"
    return process.returncode or 0, output.decode(errors="replace")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"
