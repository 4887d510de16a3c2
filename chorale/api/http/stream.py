"""EventStream: server-sent events as an ASGI response. Also detects clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chorale.api.http.sse import error_event
from chorale.errors import ChoraleError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CYCLE = "chorale.cycle"  # scope key of (uvicorn's ``RequestResponseCycle``, ``Turns``)
KEEP_ALIVE_SECONDS = 15.0
_KEEP_ALIVE = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """A streaming response that sends each chunk of ``source`` as soon as it is yielded.

    The status is sent with the first chunk, so an earlier error becomes an ordinary JSON error. If no chunk
    arrives within ``keep_alive`` seconds, the status is sent with a comment, and an error is then
    rendered by ``on_error``. If the client disconnects, ``source`` is cancelled and closed. An exception
    after the first chunk is a bug (translators turn errors into events): it is logged, and the connection is
    closed without the last chunk, so that no client considers the response complete.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes] | Callable[[EventStream], AsyncGenerator[bytes]],
        headers: Mapping[str, str] | None = None,
        *,
        keep_alive: float | None = None,
        on_error: Callable[[ChoraleError], bytes] = error_event,
    ) -> None:
        self.source = source(self) if callable(source) else source
        self.encode: Callable[[Any], bytes] = lambda events: b""  # set by a source that uses ``write``
        self._cycle: Any = None  # None until the first chunk was sent
        self._on_error = on_error
        self._begun = False
        self.status_code = 200
        self.background = None
        self.raw_headers = _HEADERS + [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in (headers or {}).items()
        ]
        self._keep_alive = KEEP_ALIVE_SECONDS if keep_alive is None else keep_alive
        self._num_sent = 0
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send, scope))
        watch = asyncio.create_task(_disconnected(receive))
        silence = asyncio.create_task(self._fill_silence(send))
        try:
            await asyncio.wait((pump, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Cancelled because of a disconnect or by the server; both are handled alike.
            for task in (pump, watch, silence):
                task.cancel()
            await asyncio.gather(pump, watch, silence, return_exceptions=True)
            with contextlib.suppress(Exception):
                await self.source.aclose()
        await self._conclude(pump, send)

    async def _conclude(self, pump: asyncio.Task[None], send: Send) -> None:
        if pump.cancelled():
            return  # the client disconnected
        error = pump.exception()
        if error is None:
            return
        if not self._begun:
            raise error
        if self._num_sent == 0 and isinstance(error, ChoraleError):
            await send({"type": "http.response.body", "body": self._on_error(error), "more_body": False})
            return
        logger.error("a stream failed after %d events", self._num_sent, exc_info=error)

    async def _pump(self, send: Send, scope: Scope) -> None:
        source = self.source
        try:
            first = await source.__anext__()
        except StopAsyncIteration:
            first = b""
        self._sending = True
        self._num_sent = 1
        await self._begin(send)
        await send({"type": "http.response.body", "body": first, "more_body": True})
        self._sending = False
        cycle, self._turns = scope.get(CYCLE, (None, None))
        self._cycle = cycle if cycle is not None and cycle.chunked_encoding else None
        async for chunk in source:
            self._sending = True
            self._num_sent += 1
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._sending = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def is_open(self) -> bool:
        """Returns whether ``write`` may be called: the first chunk was sent, and the client still reads."""
        cycle = self._cycle
        return cycle is not None and not (cycle.disconnected or cycle.flow.write_paused)

    def write(self, events: Any) -> None:
        """Sends a chunk past ``source``: waking its nested coroutines would double the cost of a token."""
        if chunk := self.encode(events):
            self._num_sent += 1
            self._turns.send(self._cycle.transport, b"%x\r\n%b\r\n" % (len(chunk), chunk))

    async def _begin(self, send: Send) -> None:
        if not self._begun:
            self._begun = True
            head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(head)

    async def _fill_silence(self, send: Send) -> None:
        """Sends a comment if no data was sent for ``keep_alive`` / 2 to ``keep_alive`` seconds.

        Polling a counter adds no cost per token, unlike a deadline.
        """
        seen = -1  # differs from _num_sent, so that the first check sends nothing
        while True:
            await asyncio.sleep(self._keep_alive / 2)
            if self._num_sent == seen and not self._sending:
                await self._begin(send)
                await send(_KEEP_ALIVE)
            seen = self._num_sent


async def _disconnected(receive: Receive) -> None:
    """Waits until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, awaitable: Awaitable[Result]) -> Result:
    """Awaits the work, but cancels it and raises ``ClientDisconnect`` if the client disconnects.

    For handlers that do not stream. The request body must have been read.
    """
    work = asyncio.ensure_future(awaitable)
    watch = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        watch.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)
