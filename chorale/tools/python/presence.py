"""Checks that the requirements of a sandbox are installed, before anything is started in it."""

from __future__ import annotations

import shutil

from chorale.tools.processes import ask
from chorale.tools.python.launch import client_environment
from chorale.tools.python.sandbox import Sandbox, SandboxMissing
from chorale.tools.python.wasm import module as interpreter

_PROGRAMS = {"bubblewrap": "bwrap", "dangerously_use_uv": "uv", "gvisor": "docker"}
_REMEDIES = {"bwrap": "apt install bubblewrap", "uv": "pip install uv"}


async def check_program(sandbox: Sandbox) -> None:
    """Checks the sandbox's program, daemon, runtime and image. Raises ``SandboxMissing``."""
    kind = sandbox.kind
    if kind == "wasm":
        try:
            interpreter.find()
        except interpreter.ModuleMissing as missing:
            raise SandboxMissing(f"wasm: {missing}") from None
        if sandbox.limits.network:
            raise SandboxMissing("wasm: network access is not supported (remove --python-tool-network)")
        return
    program = _PROGRAMS.get(kind, kind)
    if shutil.which(program) is None:
        remedy = _REMEDIES.get(program, f"install {program}")
        raise SandboxMissing(f"{kind}: {program} is not installed ({remedy})")
    if kind not in ("bubblewrap", "dangerously_use_uv"):
        await _check_image(sandbox, program)


async def _check_image(sandbox: Sandbox, program: str) -> None:
    kind = sandbox.kind
    text = await check_daemon(kind, program)
    if kind == "gvisor" and "runsc" not in text:
        raise SandboxMissing("gvisor: docker has no runtime runsc (see gvisor.dev/docs/user_guide/install)")
    code, _ = await ask(program, "image", "inspect", sandbox.image, environment=client_environment())
    if code != 0:
        raise SandboxMissing(f"{kind}: the image {sandbox.image} is missing ({program} pull {sandbox.image})")


async def check_daemon(kind: str, program: str) -> str:
    """Returns the output of the program's ``info``. Raises ``SandboxMissing`` without docker's daemon."""
    wanted = "{{json .Runtimes}}" if kind == "gvisor" else "{{.ID}}"
    code, text = await ask(program, "info", "--format", wanted, environment=client_environment())
    if code != 0 and program != "podman":
        raise SandboxMissing(f"{kind}: the docker daemon does not respond ({_last_line(text)})")
    return text


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"
