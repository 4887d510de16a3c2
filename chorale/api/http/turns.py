"""Turns: a queue in which connections that always have data to handle share the event loop fairly."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable

from chorale.turns.direct import Outlet

# Limits of one iteration of the event loop: seconds, and number of calls. Tasks that a call wakes run later.
_SECONDS, _MOST = 0.005, 32


class Turns:
    """Makes the queued calls in order, a few in each iteration of the event loop."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._is_due = False
        self._transports: list[asyncio.WriteTransport] = []
        self._chunks: list[bytes] = []  # one for each of ``_transports``

    def add(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if not self._is_due:
            self._schedule(loop)

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Returns when it is the caller's turn."""
        turn = loop.create_future()
        self.add(loop, lambda: None if turn.done() else turn.set_result(None))
        await turn

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due = True
        loop.call_soon(self._run, loop, context=contextvars.Context())  # not the context of a request

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due, end = False, time.perf_counter() + _SECONDS
        try:
            for _ in range(min(len(self._calls), _MOST)):  # excludes calls that these calls add
                self._calls.popleft()()
                if time.perf_counter() > end:
                    break
        finally:
            if self._calls and not self._is_due:
                self._schedule(loop)

    def outlet(self, transport: asyncio.WriteTransport) -> Outlet:
        return Outlet(transport, self.send)

    def send(self, transport: asyncio.WriteTransport, chunk: bytes) -> None:
        """Sends a chunk of a chunked body in the loop's next iteration, when all streams have made theirs.
        Switching between Python and the kernel for each chunk would cost cache misses."""
        if not self._chunks:
            asyncio.get_running_loop().call_soon(self._write, context=contextvars.Context())
        self._transports.append(transport)
        self._chunks.append(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def _write(self) -> None:
        transports, self._transports, chunks, self._chunks = self._transports, [], self._chunks, []
        for transport, chunk in zip(transports, chunks, strict=True):
            if not transport.is_closing():
                transport.write(chunk)
