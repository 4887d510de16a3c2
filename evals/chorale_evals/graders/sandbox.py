"""Runs programs that a model has written, each in a fresh interpreter of the python tool's sandbox.

No program ever runs in this process. If no sandbox works here, ``open_sandbox`` raises with a remedy; the
kind without isolation, ``dangerously_use_uv``, is used only if it is requested by name.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass, replace
from typing import cast, get_args
from weakref import WeakKeyDictionary

from chorale.config.engine import PythonOption, ToolConfig
from chorale.errors import ConfigError
from chorale.tools.options import Found, choose_sandbox
from chorale.tools.python.sandbox import Sandbox, SandboxMissing
from chorale.tools.python.session import MAX_CODE_BYTES, End, EndKind, Session

WASM_SLOWNESS = 10  # CPython on WebAssembly takes about ten times as long
_ATTEMPTS = 3  # to start an interpreter: a machine can be short of memory or processes for a moment
_RETRY_SECONDS = 0.5
_KINDS: tuple[str, ...] = tuple(kind for kind in get_args(PythonOption) if kind != "none")

_REASONS: dict[EndKind, str] = {
    "done": "passed",
    "raised": "raised an exception",
    "out_of_time": "out of time",
    "out_of_memory": "out of memory",
    "too_loud": "too much output",
    "died": "the interpreter ended",
}


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a program and its output, standard error included; long output lacks its middle."""

    kind: EndKind
    output: str

    @property
    def passed(self) -> bool:
        """Returns whether the program ran to its last line without an exception."""
        return self.kind == "done"

    @property
    def reason(self) -> str:
        """Returns the reason in a few words; of an exception also its last line."""
        if self.kind != "raised":
            return _REASONS[self.kind]
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1][:300] if lines else _REASONS[self.kind]


class SandboxRunner:
    """Runs programs, a few at a time. Made by ``open_sandbox``; used in one event loop."""

    def __init__(self, sandbox: Sandbox, at_once: int) -> None:
        self.sandbox = sandbox
        self._slots = asyncio.Semaphore(at_once)

    @property
    def describe(self) -> str:
        return self.sandbox.describe

    async def run(self, program: str, seconds: float | None = None) -> Ran:
        """Runs a program in an interpreter that only this program uses.

        ``seconds`` limits the program, not the start of its interpreter; in WebAssembly the limit is
        ``WASM_SLOWNESS`` times as long. Raises ``ConfigError`` if the interpreter cannot be started.
        """
        if len(program.encode("utf-8", errors="replace")) > MAX_CODE_BYTES:
            return Ran("died", f"the program is longer than {MAX_CODE_BYTES} bytes")
        async with self._slots:
            session = await self._started(self._limited(seconds))
            parts: list[str] = []
            kind: EndKind = "died"
            try:
                async for item in session.run(program):
                    if isinstance(item, End):
                        kind = item.kind
                    else:
                        parts.append(item)
            finally:
                await session.close()
        return Ran(kind, "".join(parts))

    def _limited(self, seconds: float | None) -> Sandbox:
        limits = self.sandbox.limits
        if seconds is not None:
            slowness = WASM_SLOWNESS if self.sandbox.kind == "wasm" else 1
            limits = replace(limits, seconds=seconds * slowness)
        return replace(self.sandbox, limits=limits)

    async def _started(self, sandbox: Sandbox) -> Session:
        for attempt in range(1, _ATTEMPTS + 1):
            session = Session(sandbox, f"cntr_{secrets.token_hex(24)}")
            try:
                await session.start()
                return session
            except (SandboxMissing, OSError) as error:
                await session.close()
                if attempt == _ATTEMPTS:
                    raise ConfigError(f"the python sandbox has stopped working: {error}") from None
            except BaseException:
                await session.close()
                raise
            await asyncio.sleep(_RETRY_SECONDS * attempt)
        raise AssertionError("unreachable")


async def open_sandbox(
    kind: str | None = None, *, seconds: float = 10.0, memory_bytes: int = 2**30, at_once: int | None = None
) -> SandboxRunner:
    """Returns a runner whose sandbox has passed its self-test.

    ``kind``: as in ``--python-tool``; None takes PYTHON_EXECUTION_BACKEND, else the first that works here.
    Raises ``ConfigError`` if there is none.
    """
    if kind is not None and kind not in _KINDS:
        raise ConfigError(f"no such python sandbox: {kind[:40]!r} (one of {', '.join(_KINDS)})")
    config = ToolConfig(
        servers=("demo",),
        python=cast(PythonOption | None, kind),
        python_timeout=seconds,
        python_memory_bytes=memory_bytes,
    )
    found = Found()
    pool = await choose_sandbox(config, os.environ, found, patient=True)
    if pool is None:
        reason = found.missing.get("python", "PYTHON_EXECUTION_BACKEND=none")
        raise ConfigError(f"this evaluation runs programs that the model writes, in a sandbox only: {reason}")
    sandbox = pool.sandbox
    await pool.aclose()  # it has started nothing; each program gets its own session
    return SandboxRunner(sandbox, at_once or min(8, os.cpu_count() or 1))


_RUNNERS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[SandboxRunner]] = WeakKeyDictionary()


async def run_program(program: str, seconds: float = 10.0) -> Ran:
    """Runs a program in a runner that all callers of this event loop share, opened by the first call.

    Raises ``ConfigError`` if no sandbox works here.
    """
    loop = asyncio.get_running_loop()
    if loop not in _RUNNERS:
        _RUNNERS[loop] = loop.create_task(open_sandbox())
    runner = await asyncio.shield(_RUNNERS[loop])
    return await runner.run(program, seconds)
