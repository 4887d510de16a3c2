"""An ordinary process of this user with limits but without isolation, hence its name."""

from __future__ import annotations

import sys

from chorale.tools.python.launch import GUEST, SandboxLaunch, SandboxLimits, client_environment, guest_limits


def uv(limits: SandboxLimits, directory: str) -> SandboxLaunch:
    argv = (
        "uv", "run", "--no-project", "--no-config", "--offline", "--python", sys.executable, "--quiet",
        "python", "-I", "-u", "-X", "utf8", str(GUEST), guest_limits(limits, processes=False, own_pids=False),
    )  # fmt: skip
    environment = client_environment() | {"HOME": directory}
    return SandboxLaunch(argv, environment, directory, watch_bytes=limits.memory_bytes)
