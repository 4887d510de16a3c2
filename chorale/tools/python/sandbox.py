"""The kinds of sandbox and the start of their interpreters, with one function per kind.

The model has no influence on this: code reaches the sandbox only through the interpreter's standard input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from chorale.tools.python.launch import SandboxLaunch, SandboxLimits, container, uv, wasm
from chorale.tools.python.launch_bubblewrap import bubblewrap
from chorale.tools.python.wasm.module import PYTHON as WASM_PYTHON

SandboxKind = Literal["docker", "podman", "gvisor", "bubblewrap", "wasm", "dangerously_use_uv"]
# "auto" tries these in order; it never selects a kind without isolation.
SAFE_KINDS: tuple[SandboxKind, ...] = ("gvisor", "docker", "podman", "bubblewrap", "wasm")

DEFAULT_IMAGE = "python:3.11"
_WASM_NOTE = (
    f"This interpreter is CPython {WASM_PYTHON} compiled to WebAssembly. It has the standard library only: "
    "no numpy, pandas, matplotlib or pip, no plots, no processes, no threads, no network. It is about ten "
    "times slower than usual. Files live in memory under '/mnt/data' and '/tmp'. A call that times out loses "
    "all variables and files."
)


class SandboxMissing(Exception):
    """The sandbox cannot run here. The message contains a remedy."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    kind: SandboxKind
    limits: SandboxLimits
    image: str = DEFAULT_IMAGE

    def with_memory(self, memory_bytes: int | None) -> Sandbox:
        """Lowers the memory limit of a session; a request cannot raise it."""
        if memory_bytes is None or memory_bytes >= self.limits.memory_bytes:
            return self
        return replace(self, limits=replace(self.limits, memory_bytes=max(memory_bytes, 64 * 2**20)))

    def launch(self, name: str, directory: str) -> SandboxLaunch:
        """Returns the start. ``name``: unique, for the container; ``directory``: empty, used without
        isolation only.

        Raises ``SandboxMissing``.
        """
        if self.kind == "bubblewrap":
            launch = bubblewrap(self.limits)
            if launch is None:
                raise SandboxMissing(
                    "bubblewrap: this server runs as root, and the sandbox as another user, who cannot read "
                    "python3 here: install python3 in /usr, or run the server as another user"
                )
            return launch
        if self.kind == "wasm":
            return wasm(self.limits)
        if self.kind == "dangerously_use_uv":
            return uv(self.limits, directory)
        return container(self.kind, self.limits, name, self.image)

    @property
    def describe(self) -> str:
        """Returns a line for the banner."""
        limits = self.limits
        where = f", image {self.image}" if self.kind in ("docker", "podman", "gvisor") else ""
        if self.kind == "wasm":
            where = f", CPython {WASM_PYTHON} with its standard library"
        network = "network on" if limits.network else "no network"
        text = f"{self.kind}{where}: {limits.seconds:g} s, {limits.memory_bytes // 2**20} MiB, {network}"
        return f"{text}; NOT isolated from this machine" if self.kind == "dangerously_use_uv" else text

    @property
    def note_for_model(self) -> str:
        """Returns additional information for the model, possibly empty."""
        return _WASM_NOTE if self.kind == "wasm" else ""
