"""The ``python`` tool of a conversation, and the pool of all sessions."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine
from typing import Any
from weakref import WeakValueDictionary

from chorale.harmony.builtin_tools import python_tool
from chorale.machine.tasks import end_tasks
from chorale.tools.contract import (
    CodeOutput,
    CodeStarted,
    Progress,
    PythonDetail,
    SystemTool,
    ToolCall,
    ToolResult,
)
from chorale.tools.python.sandbox import Sandbox, SandboxMissing
from chorale.tools.python.session import MAX_CODE_BYTES, End, Session
from chorale.tools.python.wasm import module as interpreter

RECIPIENT = "python"
_NO_OUTPUT = "[no output: print() what you want to see, or end with an expression]"
_COMPILING = (
    "[compiling the interpreter, once after its installation]\n"  # shown to the user, not to the model
)
_FRESH = "[a new session: variables and files of earlier calls are gone]\n"


class SessionPool:
    """Sessions by container id. Ends idle sessions, and the oldest if there are too many.

    ``first`` runs in the background at once, and sessions wait for it. If it raises ``SandboxMissing``, every
    session fails with that error.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        max_sessions: int = 16,
        idle_seconds: float = 1800.0,
        first: Coroutine[Any, Any, None] | None = None,
    ) -> None:
        self.sandbox = sandbox
        self._first = asyncio.create_task(first) if first is not None else None
        self._max_sessions = max_sessions
        self._idle_seconds = idle_seconds
        self._sessions: OrderedDict[str, tuple[float, Session]] = OrderedDict()
        self._sweeper: asyncio.Task[None] | None = None
        self._starting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._num_starting = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_compiling(self) -> bool:
        """Returns whether sessions wait for ``first``, which compiles the WebAssembly interpreter."""
        return self._first is not None and not self._first.done()

    async def take(self, container_id: str, memory_bytes: int | None) -> tuple[Session, bool]:
        """Returns the session and whether it is new.

        May end the least recently used. Raises ``SandboxMissing``.
        """
        if self._first is not None:
            await asyncio.shield(self._first)
        # Two branches must start a session only once.
        starting = self._starting.setdefault(container_id, asyncio.Lock())
        async with starting:
            found = self._sessions.pop(container_id, None)
            if found is not None and found[1].alive:
                self._sessions[container_id] = (time.monotonic(), found[1])
                return found[1], False
            self._num_starting += 1
            try:
                if found is not None:
                    await found[1].close()  # it died between two calls, and its directory still exists
                return await self._start(container_id, memory_bytes), True
            finally:
                self._num_starting -= 1

    async def _start(self, container_id: str, memory_bytes: int | None) -> Session:
        await self._make_room()
        session = Session(self.sandbox.with_memory(memory_bytes), container_id)
        try:
            await session.start()
        except BaseException:
            await session.close()
            raise
        self._sessions[container_id] = (time.monotonic(), session)
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep())
        return session

    async def _make_room(self) -> None:
        while len(self._sessions) + self._num_starting > self._max_sessions:
            idle = next((key for key, (_, s) in self._sessions.items() if not s.lock.locked()), None)
            if idle is None:
                raise SandboxMissing(f"all {self._max_sessions} python sessions are busy; try again later")
            await self._end(idle, self._sessions[idle][1])

    def forget(self, container_id: str) -> None:
        """Removes a session that has closed itself."""
        found = self._sessions.get(container_id)
        if found is not None and not found[1].alive:
            del self._sessions[container_id]

    async def _end(self, container_id: str, session: Session) -> None:
        """Ends a session, which stays listed until it has ended so that ``aclose`` waits for it."""
        await session.close()
        self.forget(container_id)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self._idle_seconds))
            limit = time.monotonic() - self._idle_seconds
            for key, (used, session) in list(self._sessions.items()):
                if used < limit and not session.lock.locked():
                    await self._end(key, session)

    async def aclose(self) -> None:
        await end_tasks(self._first, self._sweeper)
        self._sweeper = None
        while self._sessions:
            await self._sessions.popitem()[1][1].close()


class PythonTool(SystemTool):
    """The tool. ``container_id`` is unguessable and grants access to the session, which stays in the pool for
    the next response of the chain."""

    def __init__(
        self, pool: SessionPool, container_id: str, *, known: bool = False, memory_bytes: int | None = None
    ) -> None:
        self._pool = pool
        self.container_id = container_id
        self._known = known  # whether an earlier response of the chain used the session
        self._memory_bytes = memory_bytes
        self.namespace = python_tool(stateful=True, note=pool.sandbox.note_for_model)
        self.recipients = frozenset({RECIPIENT})

    def state(self) -> Any:
        """Returns the state of a used session; an unused one would later be reported as lost."""
        return {"container": self.container_id} if self._known else None

    async def call(self, call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        code = call.content
        yield CodeStarted(self.container_id)
        if len(code.encode("utf-8", errors="replace")) > MAX_CODE_BYTES:
            yield self._failed(code, "", f"Error: the code is longer than {MAX_CODE_BYTES} bytes")
            return
        waited = _COMPILING if self._pool.is_compiling else ""
        if waited:
            interpreter.hurry()
            yield CodeOutput(waited)
        try:
            session, fresh = await self._pool.take(self.container_id, self._memory_bytes)
        except (SandboxMissing, OSError) as error:
            yield self._failed(code, waited, f"Error: python is not available: {error}")
            return
        parts: list[str] = []
        if fresh and self._known:
            parts.append(_FRESH)
            yield CodeOutput(_FRESH)
        self._known = True
        end = End("died", False)
        async with session.lock:
            running = session.run(code)
            async with contextlib.aclosing(running):
                async for item in running:
                    if isinstance(item, End):
                        end = item
                    else:
                        parts.append(item)
                        yield CodeOutput(item)
        self._pool.forget(self.container_id)
        note = _note(end, session.sandbox)
        if note:
            parts.append(note)
            yield CodeOutput(note)
        logs = "".join(parts)
        detail = PythonDetail(self.container_id, code, waited + logs)
        yield ToolResult(
            RECIPIENT, logs if logs.strip() else _NO_OUTPUT, end.kind not in ("done", "raised"), detail
        )

    def _failed(self, code: str, logs: str, text: str) -> ToolResult:
        return ToolResult(RECIPIENT, text, True, PythonDetail(self.container_id, code, logs + text))


def _note(end: End, sandbox: Sandbox) -> str:
    limits = sandbox.limits
    notes = {
        "out_of_time": f"[timed out after {limits.seconds:g} s]",
        "out_of_memory": f"[killed: more than {limits.memory_bytes // 2**20} MiB of memory]",
        "too_loud": "[killed: too much output]",
        "died": "[the interpreter ended]",
    }
    if end.kind not in notes:
        return ""
    gone = "" if end.alive else " [variables and files of this session are gone]"
    return f"\n{notes[end.kind]}{gone}"


def new_container_id() -> str:
    return f"cntr_{secrets.token_hex(24)}"
