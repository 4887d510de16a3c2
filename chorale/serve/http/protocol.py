"""Request limits at the protocol level, added to uvicorn's httptools protocol.

Limits: size and number of headers (431), time until all headers have arrived (408), overhead of a chunked
body (400), and the time for which a client may stop reading (the connection is aborted). One pipelined
request may wait for the current response; then reading is paused. Errors are OpenAI error objects. A
WebSocket handshake hands the connection to ``websocket``; HTTP allows other upgrades to be ignored.

The subclass depends on internal methods of uvicorn. ``tests/api/http/test_protocol.py`` tests them over real
sockets.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from chorale.api.http.responses import error_response
from chorale.api.http.stream import OUTLET
from chorale.api.http.turns import Turns
from chorale.api.http.websocket import WRITE_TIMEOUT_SECONDS, WebSocketProtocol
from chorale.config.engine import ServerConfig
from chorale.errors import ChoraleError, HeadersTooLargeError, RequestError, RequestTimeoutError

# Seconds for which data of a refused client is read and dropped, so that it gets the response, not a reset.
_LINGER_SECONDS = 2.0
_FRAMING = (b"content-length", b"transfer-encoding")
# Bytes of a chunked body that may be overhead (sizes, extensions, trailers): in total, and for each chunk.
_CHUNK_OVERHEAD = 16 * 1024
_OVERHEAD_PER_CHUNK = 256
# A chunked body is parsed in pieces of this size, so that overhead is detected early.
_CHUNKED_PIECE = 16 * 1024
# Bytes of a connection that are parsed before those of other connections: 2 ms for chunks of one byte.
TURN_BYTES = 32 * 1024
_AT_ONCE = 4 * 1024  # up to this many bytes are parsed without waiting for other connections
# Requests that may begin in one piece. More than two are possible only after a chunked body, whose end is
# unknown until it is parsed.
MAX_BEGUN = 16


class _Parser(httptools.HttpRequestParser):
    """A parser that ignores the ``Upgrade`` header, except for WebSocket.

    Java's client sends ``Upgrade: h2c`` with the first request of each connection. httptools stops parsing
    after the headers of an upgrade, so the body would be lost or, if it arrives separately, be parsed as the
    next request.
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


class _UnchunkedCycle(RequestResponseCycle):
    """The cycle of an HTTP/1.0 request. A response of unknown length ends with the connection."""

    async def send(self, message: Any) -> None:
        if self.chunked_encoding is None:
            self._has_length = any(name == b"content-length" for name, _ in message["headers"])
            if not self._has_length:
                self.chunked_encoding = False
        elif not self._has_length:
            self.expected_content_length = len(message["body"])  # uvicorn compares the two
        await super().send(message)


class LimitedProtocol(HttpToolsProtocol):
    """One connection. ``limited_protocol`` sets the class attributes; uvicorn creates the instances."""

    limits: ServerConfig
    turns: Turns

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._offered = False  # the headers request an upgrade, which is ignored
        self.opens_websocket = False  # the headers request an upgrade to WebSocket
        self._successor: WebSocketProtocol | None = None
        self._unparsed = bytearray()  # received bytes
        self._has_turn = False  # a call of _read_on is scheduled
        self._num_begun = 0  # requests that began in this piece
        self._num_left = 0  # bytes of a body with Content-Length that have not been parsed
        self._is_chunked = False
        self._num_overhead = 0  # overhead of a chunked body in bytes, minus the allowance for its chunks
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
        if self._refused:
            return
        self._unparsed += data
        if len(data) > _AT_ONCE:
            self._take_turn()
            self._pause_or_resume()
        elif not self._has_turn:
            self._read_on()

    def _read_on(self) -> None:
        """Parses up to ``TURN_BYTES`` bytes, but stops at a request that must wait for another response."""
        self._has_turn, left = False, TURN_BYTES
        while self._may_parse() and left > 0:
            piece = self._next_piece()
            left -= len(piece)
            self._parse(piece)
        if self._successor is not None and self._unparsed:
            self._successor.data_received(bytes(self._unparsed))
        if self._refused or self._successor is not None or self.transport.is_closing():
            self._unparsed.clear()
            return
        if self._may_parse():
            self._take_turn()
        self._pause_or_resume()

    def _take_turn(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            self.turns.add(self.loop, self._read_on)

    def _may_parse(self) -> bool:
        ended = self._refused or self._successor is not None or self.transport.is_closing()
        return bool(self._unparsed) and not self.pipeline and not ended

    def _pause_or_resume(self) -> None:
        """Pauses reading while bytes are unparsed, or the handler has much of a body left to read."""
        cycle = self.cycle
        is_full = cycle is not None and not cycle.response_complete and len(cycle.body) > HIGH_WATER_LIMIT
        if self._unparsed or self.pipeline or is_full:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def _next_piece(self) -> bytes:
        """Removes and returns unparsed bytes, up to the end of the current headers or body if it is known."""
        if self._in_head:
            self._arm_head_timer()
            most = self.limits.max_header_bytes + 1 - self._num_head_bytes
            end = self._unparsed.find(b"\r\n\r\n", 0, most)
            most = end + 4 if end >= 0 else most
        else:
            most = _CHUNKED_PIECE if self._is_chunked else max(1, min(self._num_left, TURN_BYTES))
        piece = bytes(self._unparsed[:most])
        del self._unparsed[:most]
        return piece

    def _parse(self, piece: bytes) -> None:
        was_in_body = not self._in_head
        self._head_is_new, self._num_begun = False, 0
        super().data_received(piece)
        if self._is_chunked and not self._in_head:
            self._count_overhead(len(piece) if was_in_body else 0)
        # The headers of a request that begins within this piece are counted from the next piece on.
        if self._in_head and not self._head_is_new:
            self._num_head_bytes += len(piece)
            if self._num_head_bytes > self.limits.max_header_bytes:
                self._refusal = HeadersTooLargeError(
                    f"the headers are larger than {self.limits.max_header_bytes} bytes"
                )
        if self._refusal is not None:
            self._refuse(self._refusal)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._may_parse():
            self._take_turn()
        if not self.transport.is_closing():
            self._pause_or_resume()

    def _count_overhead(self, num_bytes: int) -> None:
        """Counts the overhead in ``num_bytes`` of a chunked body; 0 if they came with its headers."""
        self._num_overhead = max(0, self._num_overhead + num_bytes) if num_bytes else 0
        if self._num_overhead > _CHUNK_OVERHEAD:
            self._refusal = RequestError(
                "the chunks of the body have too many extensions or trailers", code="invalid_http"
            )

    def on_chunk_header(self) -> None:
        self._num_overhead -= _OVERHEAD_PER_CHUNK

    def on_message_begin(self) -> None:
        self._num_headers = 0
        self._num_begun += 1
        if self._num_begun > MAX_BEGUN:
            self._refusal = RequestError("too many pipelined requests", code="invalid_http")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self.limits.max_headers:
            self._refusal = HeadersTooLargeError(f"there are more than {self.limits.max_headers} headers")
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._offered:  # called by the parser from ``pass_over``
            self._offered = False
            return
        self._offered = self.parser.should_upgrade()
        self._in_head = False
        self._num_head_bytes = 0
        self._cancel_head_timer()
        self._is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        self._num_left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self._take_host()
        if self._offered and self._offers_websocket():
            self._offered, self.opens_websocket = False, True
        elif self._refusal is None:
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                self.cycle.__class__ = _UnchunkedCycle
            else:
                self.scope[OUTLET] = self._outlet  # type: ignore[literal-required]

    def _take_host(self) -> None:
        """Replaces the Host header with the host of an absolute request target (RFC 9112, section 3.2.2)."""
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
        self._num_left -= len(body)
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offered or self.opens_websocket:  # httptools ends an upgrade after the headers
            return
        self._in_head = self._head_is_new = True
        if self._refusal is None:
            super().on_message_complete()

    def pass_over(self) -> _Parser:
        """Returns a parser for the body of a request with an ignored upgrade, after feeding it headers."""
        framing = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] in _FRAMING]
        self.parser = parser = _Parser(self)
        parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"]))
        return parser

    # ---------------------------------------------------------------- WebSocket

    def _offers_websocket(self) -> bool:
        """Returns whether the request is a WebSocket handshake: a GET without a body, not pipelined."""
        has_body = any(name in _FRAMING for name, _ in self.headers)
        idle = self.cycle is None or self.cycle.response_complete
        method, version = self.parser.get_method(), self.parser.get_http_version()
        is_get = method == b"GET" and version == "1.1"
        return is_get and not has_body and idle and self._get_upgrade() == b"websocket"

    def open_websocket(self, rest: bytes) -> None:
        """Hands the connection to a WebSocketProtocol. ``rest``: bytes received after the headers."""
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
        self._successor = WebSocketProtocol(self.app, self.server_state, self.limits, self.loop, self.turns)
        self.transport.set_protocol(self._successor)
        self._successor.open(self.transport, scope, rest)

    # ---------------------------------------------------------------- timeouts

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._outlet = self.turns.outlet(transport)
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_write_timer()
        self._outlet.is_open = False
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
        self._outlet.is_open = False
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._outlet.is_open = True
        self._cancel_write_timer()

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # ---------------------------------------------------------------- refusals

    def send_400_response(self, msg: str) -> None:
        """Refuses the request. uvicorn calls this if httptools raises a parser error."""
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
        if self.cycle is not None:  # the body is invalid HTTP: the handler must not wait for the rest
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
        """Returns whether a response may have been started, after which no error can be sent."""
        cycle = self.cycle
        unfinished = cycle is not None and cycle.response_started and not cycle.response_complete
        return unfinished or bool(self.pipeline)


def limited_protocol(config: ServerConfig) -> type[LimitedProtocol]:
    """Returns the protocol class with the limits of one configuration, for uvicorn to instantiate."""
    return type("ConfiguredProtocol", (LimitedProtocol,), {"limits": config, "turns": Turns()})
