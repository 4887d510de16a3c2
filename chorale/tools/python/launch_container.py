"""docker, podman, and docker with gVisor: a container without privileges, network or persistent files."""

from __future__ import annotations

from chorale.tools.python.launch import (
    GUEST,
    NOBODY,
    SHARED_MEMORY_BYTES,
    SandboxLaunch,
    SandboxLimits,
    client_environment,
    guest_limits,
)


def container(kind: str, limits: SandboxLimits, name: str, image: str) -> SandboxLaunch:
    """Returns the start. The container's cgroup counts tmpfs and shared memory like its processes."""
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
