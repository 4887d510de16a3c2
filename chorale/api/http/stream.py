"""EventStream: server-sent events as an ASGI response. Also detects clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chorale.api.http.sse import error_event
from chorale.errors import ChoraleError
from chorale.machine.tasks import end_tasks
from chorale.turns.direct import Direct

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

OUTLET = "chorale.outlet"  # scope key of the ``Outlet`` of a response with a chunked body
KEEP_ALIVE = "chorale.keep_alive"  # scope key of --sse-keep-alive-interval
_COMMENT = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """A streaming response that sends each chunk of ``source`` as soon as it is yielded.

    The status is sent with the first chunk, so an earlier error becomes an ordinary JSON error. If no chunk
    arrives within ``scope[KEEP_ALIVE]`` seconds, the status is sent with a comment, and an error is then
    rendered by ``on_error``; no comments are sent if it is 0 or missing. If the client disconnects,
    ``source`` is cancelled and closed. An exception after the first chunk is a bug (translators turn errors
    into events): it is logged, and the connection is closed without the last chunk, so that no client
    considers the response complete.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes] | Callable[[Direct], AsyncGenerator[bytes]],
        headers: Mapping[str, str] | None = None,
        *,
        on_error: Callable[[ChoraleError], bytes] = error_event,
        on_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``on_end``: is awaited at the end, even if ``source`` was never started."""
        self._direct = Direct()
        self.source = source(self._direct) if callable(source) else source
        self._on_error, self._on_end = on_error, on_end
        self.status_code = 200
        self.background = None
        self.raw_headers = _HEADERS + [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in (headers or {}).items()
        ]
        self._begun = self._has_data = self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send, scope))
        tasks = [pump, asyncio.create_task(_disconnected(receive))]
        if keep_alive := scope.get(KEEP_ALIVE, 0.0):
            tasks.append(asyncio.create_task(self._fill_silence(send, keep_alive)))
        try:
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Cancelled because of a disconnect or by the server; both are handled alike.
            await end_tasks(*tasks)
            with contextlib.suppress(Exception):
                await self.source.aclose()
            if self._on_end is not None:
                await self._on_end()
        await self._conclude(pump, send)

    async def _conclude(self, pump: asyncio.Task[None], send: Send) -> None:
        error = None if pump.cancelled() else pump.exception()
        if error is None:
            return  # the stream has ended, or the client disconnected
        if not self._begun:
            raise error
        if not self._has_data and isinstance(error, ChoraleError):
            await send({"type": "http.response.body", "body": self._on_error(error), "more_body": False})
            return
        logger.error("a stream failed", exc_info=error)

    async def _pump(self, send: Send, scope: Scope) -> None:
        first = await anext(self.source, b"")
        self._sending = self._has_data = True
        self._direct.is_idle = False
        await self._begin(send)
        await send({"type": "http.response.body", "body": first, "more_body": True})
        self._sending = False
        self._direct.outlet = scope.get(OUTLET)
        async for chunk in self.source:
            self._sending = True
            self._direct.is_idle = False
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._sending = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        if not self._begun:
            self._begun = True
            head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(head)

    async def _fill_silence(self, send: Send, keep_alive: float) -> None:
        """Sends a comment if no data was sent for ``keep_alive`` / 2 to ``keep_alive`` seconds.

        Polling adds little cost per token, unlike a deadline.
        """
        while True:
            await asyncio.sleep(keep_alive / 2)
            if self._direct.is_idle and not self._sending:
                await self._begin(send)
                await send(_COMMENT)
            self._direct.is_idle = True


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
        await end_tasks(work, watch)
