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


class HttpError(Exception):
    """The server's response cannot be used. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Target:
    """The URL and headers of a load's requests."""

    url: str  # including the path
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def parts(self) -> tuple[str, int, bool, str]:
        """(host, port, whether TLS, path)."""
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
        self.on_event: list[
            tuple[bytes, float]
        ] = []  # events not yet taken, with arrival times (``time.perf_counter`` seconds)
        self.reply = Reply()
        self.reusable = True
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._events = bytearray()
        self._in_head = True
        self._streams = False
        self._chunked = False
        self._left = -1  # bytes of the body or chunk still to arrive; -1: unknown
        self._waiter: asyncio.Future[None] | None = None
        self._lost: Exception | None = None

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._lost = exc or HttpError("the server closed the connection")
        if not self._in_head and not self._chunked and self._left < 0:
            self.reply.done = True  # a body delimited by the end of the connection
        self._wake()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        try:
            if self._in_head and not self._read_head():
                return
            self._read_body(now)
        except (HttpError, ValueError) as error:
            self._lost = error
            self.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ------------------------------------------------------------------ for the caller

    async def request(self, target: Target, body: bytes) -> None:
        """Sends a request. Read the response with ``wait``."""
        *_, path = target.parts
        self.reply, self._in_head, self._streams, self._chunked, self._left = Reply(), True, False, False, -1
        self._events.clear()
        self.on_event = []
        lines = [
            f"POST {path} HTTP/1.1", f"host: {target.authority}", "content-type: application/json",
            f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in target.headers),
        ]  # fmt: skip
        assert self._transport is not None
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    async def wait(self) -> list[tuple[bytes, float]]:
        """Returns events since the last call, or nothing at the end. Raises the connection's error."""
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

    # ------------------------------------------------------------------ parsing

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        self.reply.status = int(first.split(" ", 2)[1])
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (li.partition(":") for li in lines)
        }
        self._streams = headers.get("content-type", "").startswith("text/event-stream")
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        self._left = int(headers.get("content-length", -1)) if not self._chunked else -1
        if headers.get("connection", "").lower() == "close":
            self.reusable = False
        self._in_head = False
        return True

    def _read_body(self, now: float) -> None:
        while self._buffer and not self.reply.done:
            if self._chunked and self._left < 0:
                end = self._buffer.find(b"\r\n")
                if end < 0:
                    return
                self._left = int(bytes(self._buffer[:end]).split(b";")[0], 16)
                del self._buffer[: end + 2]
                if self._left == 0:
                    self.reply.done = True
                    self._buffer.clear()
                    return
            take = len(self._buffer) if self._left < 0 else min(self._left, len(self._buffer))
            self._accept(self._buffer[:take], now)
            del self._buffer[:take]
            if self._left >= 0:
                self._left -= take
            if self._left == 0 and not self._end_of_part():
                return

    def _end_of_part(self) -> bool:
        """Finishes a chunk or a body of known length. Returns False if its line end has not arrived."""
        if not self._chunked:
            self.reply.done = True
            return True
        if len(self._buffer) < 2:
            return False
        del self._buffer[:2]
        self._left = -1
        return True

    def _accept(self, data: bytearray, now: float) -> None:
        if not self._streams:
            self.reply.body += data
            return
        self._events += data
        *whole, rest = self._events.split(b"\n\n")
        self._events = rest
        for event in whole:
            if event.startswith(b"data: "):
                self.on_event.append((bytes(event[6:]), now))
            elif not event.startswith(b":"):  # a comment keeps the connection alive
                lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
                self.on_event.append((bytes(b"\n".join(lines)), now))


async def open_connection(target: Target) -> EventConnection:
    host, port, secure, _ = target.parts
    context = ssl.create_default_context() if secure else None
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(EventConnection, host, port, ssl=context)
    return protocol
