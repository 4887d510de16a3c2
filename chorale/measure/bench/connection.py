"""A keep-alive HTTP/1.1 connection that reads server-sent events with little work per token.

The benchmark client must not be the bottleneck: at 20,000 tokens a second it may spend about 20 microseconds
a token on each core. Events are therefore split as bytes, and only unusual ones are parsed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools


class HttpError(Exception):
    """The server's response cannot be used. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Target:
    """The URL and headers of a benchmark's requests."""

    url: str  # including the path
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def parts(self) -> tuple[str, int, bool, str]:
        """Returns (host, port, whether TLS is used, path)."""
        split = urlsplit(self.url)
        secure = split.scheme == "https"
        path = split.path + (f"?{split.query}" if split.query else "")
        return split.hostname or "localhost", split.port or (443 if secure else 80), secure, path or "/"

    @property
    def authority(self) -> str:
        """Host and port as written in the URL, for the Host header (an IPv6 address stays in brackets)."""
        return urlsplit(self.url).netloc.rpartition("@")[2]


@dataclass(slots=True)
class Reply:
    """The state of one response."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)  # the whole body, empty for a stream
    done: bool = False


class EventConnection(asyncio.Protocol):
    """Collects each event's bytes (without ``data: ``) with its arrival time in ``on_event``."""

    def __init__(self) -> None:
        # Events not yet returned by ``wait``, with arrival times (``time.perf_counter`` seconds).
        self.on_event: list[tuple[bytes, float]] = []
        self.reusable = True
        self._transport: asyncio.Transport | None = None
        self._now = 0.0
        self._begin_reply()
        self._waiter: asyncio.Future[None] | None = None
        self._lost: Exception | None = None

    def _begin_reply(self) -> None:
        self.reply = Reply()
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._streams = False
        self._events = b""  # the beginning of an event that has not arrived in full

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._lost = exc or HttpError("the server closed the connection")
        if self.reply.status and not self._headers.keys() & {b"content-length", b"transfer-encoding"}:
            self.reply.done = True  # a body delimited by the end of the connection
        self._wake()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lost = HttpError(f"not an HTTP/1.1 response ({error})")
            self.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ------------------------------------------------------------------ for the caller

    async def request(self, target: Target, body: bytes) -> None:
        """Sends a request. Read the response with ``wait``."""
        *_, path = target.parts
        self._begin_reply()
        self.on_event = []
        lines = [
            f"POST {path} HTTP/1.1", f"host: {target.authority}", "content-type: application/json",
            f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in target.headers),
        ]  # fmt: skip
        assert self._transport is not None
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    async def wait(self) -> list[tuple[bytes, float]]:
        """Returns the events since the last call, none at the end. Raises the connection's error."""
        while not self.on_event and not self.reply.done:
            if self._lost is not None:
                raise self._lost
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self.on_event = self.on_event, []
        return events

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------------ called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.reply.status = self._parser.get_status_code()
        self._streams = self._headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self.reusable = self.reusable and self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        if not self._streams:
            self.reply.body += data
            return
        *whole, self._events = (self._events + data).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: "):
                self.on_event.append((event[6:], self._now))
            elif not event.startswith(b":"):  # a comment keeps the connection alive
                lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
                self.on_event.append((b"\n".join(lines), self._now))

    def on_message_complete(self) -> None:
        self.reply.done = True


async def open_connection(target: Target) -> EventConnection:
    host, port, secure, _ = target.parts
    context = ssl.create_default_context() if secure else None
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(EventConnection, host, port, ssl=context)
    return protocol
