"""Runs programs that a model has written, each in a fresh interpreter of the python tool's sandbox.

No program ever runs in this process. If no sandbox works here, ``run_program`` raises with a remedy; the kind
without isolation, ``dangerously_use_uv``, is used only if PYTHON_EXECUTION_BACKEND names it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from chorale.config.engine import ToolConfig
from chorale.errors import ConfigError
from chorale.tools.options import Found, choose_sandbox
from chorale.tools.python.sandbox import Sandbox, SandboxMissing
from chorale.tools.python.session import MAX_CODE_BYTES, End, EndKind, Session

WASM_SLOWNESS = 10  # CPython on WebAssembly takes about ten times as long
_ATTEMPTS = 3  # to start an interpreter: memory or processes may be short for a moment
_RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a program and its output, standard error included; long output lacks its middle."""

    kind: EndKind
    output: str

    @property
    def passed(self) -> bool:
        return self.kind == "done"

    @property
    def reason(self) -> str:
        """Returns the last line of an exception, else the kind of the end."""
        if self.passed:
            return "passed"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1][:300] if self.kind == "raised" and lines else self.kind.replace("_", " ")


class SandboxRunner:
    """Runs programs, a few at a time. Made by ``open_sandbox``; used in one event loop."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._slots = asyncio.Semaphore(min(8, os.cpu_count() or 1))

    async def run(self, program: str, seconds: float) -> Ran:
        """Runs a program in an interpreter that only this program uses.

        ``seconds`` limits the program, not the start of its interpreter; in WebAssembly the limit is
        ``WASM_SLOWNESS`` times as long. Raises ``ConfigError`` if the interpreter cannot be started.
        """
        if len(program.encode("utf-8", errors="replace")) > MAX_CODE_BYTES:
            return Ran("died", f"the program is longer than {MAX_CODE_BYTES} bytes")
        slowness = WASM_SLOWNESS if self.sandbox.kind == "wasm" else 1
        limits = replace(self.sandbox.limits, seconds=seconds * slowness)
        async with self._slots:
            session = await _started(replace(self.sandbox, limits=limits))
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


async def _started(sandbox: Sandbox) -> Session:
    for attempt in range(1, _ATTEMPTS + 1):
        session = Session(sandbox, f"cntr_{secrets.token_hex(24)}")
        try:
            await session.start()
            return session
        except BaseException as error:
            await session.close()
            if not isinstance(error, SandboxMissing | OSError):
                raise
            if attempt == _ATTEMPTS:
                raise ConfigError(f"the python sandbox has stopped working: {error}") from None
        await asyncio.sleep(_RETRY_SECONDS * attempt)
    raise AssertionError("unreachable")


async def open_sandbox() -> SandboxRunner:
    """Returns a runner whose sandbox has passed its self-test. Raises ``ConfigError`` if there is none."""
    config, found = ToolConfig(servers=("demo",), python_memory_bytes=2**30), Found()
    pool = await choose_sandbox(config, os.environ, found, patient=True)
    if pool is None:
        reason = found.missing.get("python", "PYTHON_EXECUTION_BACKEND=none")
        raise ConfigError(f"this evaluation runs programs that the model writes, in a sandbox only: {reason}")
    await pool.aclose()  # it has started nothing; each program gets its own session
    return SandboxRunner(pool.sandbox)


_RUNNERS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[SandboxRunner]] = WeakKeyDictionary()


async def run_program(program: str, seconds: float = 10.0) -> Ran:
    """Runs a program in a runner that all callers of this event loop share, opened by the first call."""
    loop = asyncio.get_running_loop()
    if loop not in _RUNNERS:
        _RUNNERS[loop] = loop.create_task(open_sandbox())
    return await (await asyncio.shield(_RUNNERS[loop])).run(program, seconds)
