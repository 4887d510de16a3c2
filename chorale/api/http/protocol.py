"""Request limits at the protocol level, added to uvicorn's httptools protocol.

Limits: header bytes and count (431), header time (408), overhead of a chunked body (400), and the time for
which a client may not read (the connection is dropped). Errors are OpenAI error objects. A WebSocket
handshake hands the connection to ``websocket``; offers of other protocols are ignored, which HTTP allows.

The subclass is small because it depends on a few of uvicorn's internal methods, which
``tests/api/http/test_protocol.py`` tests over real sockets.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from chorale.api.http.responses import error_response
from chorale.api.http.websocket import WRITE_TIMEOUT_SECONDS, WebSocketProtocol
from chorale.config import ServerConfig
from chorale.errors import ChoraleError, HeadersTooLargeError, RequestError, RequestTimeoutError

# Seconds for which a refused client's data is read and dropped, so that it sees the response and not a reset.
_LINGER_SECONDS = 2.0
_FRAMING = (b"content-length", b"transfer-encoding")
# Allowed bytes of a chunked body that are not data (sizes, extensions, trailers): in total, plus per chunk.
_CHUNK_OVERHEAD = 16 * 1024
_OVERHEAD_PER_CHUNK = 256
_CHUNKED_PIECE = (
    16 * 1024
)  # a chunked body is parsed in pieces of this size, so that overhead is detected early


class _Parser(httptools.HttpRequestParser):
    """A parser that continues after a head that offers another protocol, unless that is WebSocket.

    Java's client offers HTTP/2 (``Upgrade: h2c``) with the first request of each connection. httptools stops
    at such a head and leaves the rest to the other protocol, so the body would be lost or, if it arrives
    separately, be parsed as the next request.
    """

    def __init__(self, protocol: LimitedProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn

    def feed_data(self, data: Any) -> None:
        parser, rest = self, memoryview(data)
        while True:
            try:
                return httptools.HttpRequestParser.feed_data(parser, rest)
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                if self._protocol.opens_websocket:
                    return self._protocol.open_websocket(bytes(rest))
                parser = self._protocol.pass_over()


class LimitedProtocol(HttpToolsProtocol):
    """One connection. ``limited_protocol`` sets ``limits`` on the class; uvicorn creates the instances."""

    limits: ServerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._offered = False  # the head offers another protocol; its body follows
        self.opens_websocket = False  # the other protocol is WebSocket
        self._successor: WebSocketProtocol | None = None
        self._is_chunked = False
        self._num_overhead = 0  # non-data bytes of a chunked body, minus the allowance of its chunks
        self._in_head = True
        self._head_is_new = True
        self._num_head_bytes = 0
        self._num_headers = 0
        self._refusal: ChoraleError | None = None
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # ---------------------------------------------------------------- bytes

    def data_received(self, data: bytes) -> None:
        while data and not self._refused:
            if self._successor is not None:
                self._successor.data_received(data)
                return
            part, was_in_body = data, not self._in_head
            if self._in_head:
                self._arm_head_timer()
                part = data[: self.limits.max_header_bytes + 1 - self._num_head_bytes]
            elif self._is_chunked:
                part = data[:_CHUNKED_PIECE]
            data = data[len(part) :]
            self._head_is_new = False
            super().data_received(part)
            if self._is_chunked and not self._in_head:
                self._count_overhead(len(part) if was_in_body else 0)
            # The head of a pipelined request that begins within this part is counted from the next part on.
            if self._in_head and not self._head_is_new:
                self._num_head_bytes += len(part)
                if self._num_head_bytes > self.limits.max_header_bytes:
                    self._refusal = HeadersTooLargeError(
                        f"the headers are larger than {self.limits.max_header_bytes} bytes"
                    )
            if self._refusal is not None:
                self._refuse(self._refusal)

    def _count_overhead(self, num_bytes: int) -> None:
        """Counts the overhead of ``num_bytes`` of a chunked body; 0 if unknown, since its head came with
        them.
        """
        self._num_overhead = max(0, self._num_overhead + num_bytes) if num_bytes else 0
        if self._num_overhead > _CHUNK_OVERHEAD:
            self._refusal = RequestError(
                "the chunks of the body have too many extensions or trailers", code="invalid_http"
            )

    def on_chunk_header(self) -> None:
        self._num_overhead -= _OVERHEAD_PER_CHUNK

    def on_message_begin(self) -> None:
        self._num_headers = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self.limits.max_headers:
            self._refusal = HeadersTooLargeError(f"there are more than {self.limits.max_headers} headers")
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._offered:  # this parser replaces it
            self._offered = False
            return
        self._offered = self.parser.should_upgrade()
        self._in_head = False
        self._num_head_bytes = 0
        self._cancel_head_timer()
        self._is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        self._take_host()
        if self._offered and self._offers_websocket():
            self._offered, self.opens_websocket = False, True
        elif self._refusal is None:
            super().on_headers_complete()

    def _take_host(self) -> None:
        """Lets a request target with a host replace the Host header (RFC 9112, section 3.2.2)."""
        if self.url.startswith((b"/", b"*")):
            return
        target = httptools.parse_url(self.url)
        if target.host:
            host = b"[%s]" % target.host if b":" in target.host else target.host
            authority = host if target.port is None else b"%s:%d" % (host, target.port)
            self.headers[:] = [
                (name, authority if name == b"host" else value) for name, value in self.headers
            ]

    def on_body(self, body: bytes) -> None:
        self._num_overhead -= len(body)
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offered or self.opens_websocket:  # httptools considers the request complete after the head
            return
        self._in_head = self._head_is_new = True
        if self._refusal is None:
            super().on_message_complete()

    def pass_over(self) -> _Parser:
        """Returns a parser for the body of an ignored offer, primed with a head that delimits the body."""
        framing = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] in _FRAMING]
        self.parser = parser = _Parser(self)
        parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"]))
        return parser

    # ---------------------------------------------------------------- another protocol

    def _offers_websocket(self) -> bool:
        """Returns whether the request is a WebSocket handshake: a GET without a body and without pipelined
        data.
        """
        has_body = any(name in _FRAMING for name, _ in self.headers)
        idle = self.cycle is None or self.cycle.response_complete
        method, version = self.parser.get_method(), self.parser.get_http_version()
        is_get = method == b"GET" and version == "1.1"
        return is_get and not has_body and idle and self._get_upgrade() == b"websocket"

    def open_websocket(self, rest: bytes) -> None:
        """Hands the connection over. ``rest``: bytes received after the head."""
        self._cancel_head_timer()
        self._cancel_write_timer()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        target = httptools.parse_url(self.url)
        path = target.path or b"/"
        scope = {
            **self.scope,
            "type": "websocket",
            "scheme": "wss" if self.scheme == "https" else "ws",
            "method": "GET",
            "path": self.root_path + urllib.parse.unquote(path.decode("ascii")),
            "raw_path": self.root_path.encode("ascii") + path,
            "query_string": target.query or b"",
            "subprotocols": [],
            "extensions": {"websocket.http.response": {}},
        }
        self._successor = WebSocketProtocol(self.app, self.server_state, self.limits, self.loop)
        self.transport.set_protocol(self._successor)
        self._successor.open(self.transport, scope, rest)

    # ---------------------------------------------------------------- time

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def _arm_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.header_timeout, self._head_is_late)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._num_head_bytes == 0:
            self.transport.close()  # no request, so no response
        else:
            self._refuse(RequestTimeoutError("the headers did not arrive in time"))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # ---------------------------------------------------------------- refusals

    def send_400_response(self, msg: str) -> None:
        """Refuses the request. uvicorn calls this when httptools rejects the bytes."""
        self._refuse(self._refusal or RequestError("the request is not valid HTTP", code="invalid_http"))

    def _refuse(self, error: ChoraleError) -> None:
        if self._refused:
            return
        self._refused = True
        self._cancel_head_timer()
        if self.transport.is_closing():
            return
        if self._is_answering():
            self.transport.close()
            return
        if self.cycle is not None:  # its body was invalid HTTP: stop the handler from waiting for the rest
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        response = error_response(error)
        head = [STATUS_LINE[error.status], *(b"%s: %s\r\n" % pair for pair in response.raw_headers)]
        self.transport.write(b"".join([*head, b"connection: close\r\n\r\n", bytes(response.body)]))
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(_LINGER_SECONDS, self.transport.close)
        else:  # TLS has no half-close
            self.transport.close()

    def _is_answering(self) -> bool:
        """Returns whether a response may be in progress, so that no error can be written."""
        cycle = self.cycle
        unfinished = cycle is not None and cycle.response_started and not cycle.response_complete
        return unfinished or bool(self.pipeline)


def limited_protocol(config: ServerConfig) -> type[LimitedProtocol]:
    """Returns the protocol class for one configuration. uvicorn instantiates it, so the class holds the
    limits.
    """
    return type("ConfiguredProtocol", (LimitedProtocol,), {"limits": config})
