"""WebSocket connections as ASGI messages. The ``websockets`` library parses and writes frames (RFC 6455).

uvicorn's classes limit neither the duration of a message nor the time for which a client may not read.
Limits: ``max_body_bytes`` and ``body_timeout`` per message; no compression, which rules out decompression
bombs; the connection is not read while a message waits for the application; frames are handled in slices,
between which other connections are served; a client that floods the server with small frames, sends no frame
(not even a pong) for ``SILENCE_SECONDS``, or does not read for ``WRITE_TIMEOUT_SECONDS``, is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Scope
from uvicorn.server import ServerState
from websockets.datastructures import Headers
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from chorale.api.http.responses import error_response
from chorale.api.http.turns import Turns
from chorale.config.engine import ServerConfig
from chorale.errors import ChoraleError, RequestError, UpgradeRequiredError

logger = logging.getLogger(__name__)

GOING_AWAY = "chorale.going_away"  # scope key of an asyncio.Event that is set when the server shuts down
PING_SECONDS = 15.0
SILENCE_SECONDS = 45.0
WRITE_TIMEOUT_SECONDS = 60.0
_CLOSE_SECONDS = 5.0  # time limit for the client's half of a closing handshake
# Bytes per turn, bytes per slice, and frames after which a turn ends: 340 frames of 6 bytes take 5 ms.
_TURN_BYTES, _SLICE_BYTES, _MANY_FRAMES = 64 * 1024, 2 * 1024, 16
# Control frames, and fragments of less than SMALL_BYTES, cost time and contain little data. A client may send
# MAX_SMALL_FRAMES at once, and SMALL_FRAMES_PER_SECOND on average.
SMALL_BYTES = 64
MAX_SMALL_FRAMES = 1000
SMALL_FRAMES_PER_SECOND = 100
_MESSAGES = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
_HANDSHAKE = (b"connection", b"upgrade")


class _Frames(ServerProtocol):
    """The library's protocol, which refuses handshakes with the API's error objects."""

    def reject(self, status: Any, text: str) -> Response:
        kind = UpgradeRequiredError if int(status) == HTTPStatus.UPGRADE_REQUIRED else RequestError
        return _as_response(kind(text.partition("\n")[0], code="invalid_handshake"))


def _as_response(error: ChoraleError) -> Response:
    made = error_response(error)
    return _response(made.status_code, made.raw_headers, bytes(made.body))


def _response(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> Response:
    shown = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])
    shown["connection"] = "close"
    return Response(status, HTTPStatus(status).phrase, shown, body)


class WebSocketProtocol(asyncio.Protocol):
    """One connection, taken over from the HTTP protocol after it has read the head of the handshake."""

    def __init__(
        self,
        app: ASGIApp,
        server: ServerState,
        limits: ServerConfig,
        loop: asyncio.AbstractEventLoop,
        turns: Turns,
    ) -> None:
        self._app, self._limits, self._loop, self._turns = app, limits, loop, turns
        self._connections, self._tasks = server.connections, server.tasks
        self._frames = _Frames(max_size=limits.max_body_bytes)
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._message = bytearray()  # fragments of an incomplete message
        self._is_text = False
        self._received = bytearray()  # bytes received and not yet handled
        self._has_turn = False  # a call of _read_on is scheduled
        self._num_small = 0.0  # small frames minus those allowed by the time passed
        self._small_at = loop.time()
        self._accepted: Response | None = None
        self._refusal: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self._is_open = self._is_reading = self._has_left = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._going_away = asyncio.Event()
        self._heard = loop.time()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def open(self, transport: asyncio.Transport, scope: Scope, rest: bytes) -> None:
        """Takes the connection over. ``rest``: bytes received after the head."""
        self.transport = transport
        self._connections.add(self)  # type: ignore[arg-type]
        self._received += rest
        transport.pause_reading()
        self._frames.receive_data(_handshake(scope["headers"]))
        requests = [event for event in self._frames.events_received() if isinstance(event, Request)]
        if not requests:
            self._refuse(_as_response(RequestError("the handshake is malformed", code="invalid_handshake")))
            return
        self._accepted = self._frames.accept(requests[0])
        if self._accepted.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self._refuse(self._accepted)
            return
        task = self._loop.create_task(self._run({**scope, GOING_AWAY: self._going_away}))
        task.add_done_callback(self._tasks.discard)
        self._tasks.add(task)

    async def _run(self, scope: Scope) -> None:
        try:
            await self._app(scope, self.receive, self.send)
        except ClientDisconnect:
            pass
        except Exception:
            logger.exception("a WebSocket connection failed")
        if self._is_open:
            self._close(1011, "")
        elif not self.transport.is_closing():
            self._refuse(_as_response(ChoraleError("internal error")))

    def shutdown(self) -> None:
        """Tells the application to finish. uvicorn calls this when the server shuts down."""
        self._going_away.set()

    # ---------------------------------------------------------------- bytes in

    def data_received(self, data: bytes) -> None:
        if self._has_left:
            return  # data is ignored until the connection is closed
        self._received += data
        self._take_turn()
        self._pause_or_resume()

    def _take_turn(self) -> None:
        if self._received and not self._has_turn and self._may_handle():
            self._has_turn = True
            self._turns.add(self._loop, self._read_on)

    def _may_handle(self) -> bool:
        """Returns whether the connection is accepted and no message waits to be received or written."""
        return self._accepted is None and self._inbox.empty() and self._writable.is_set()

    def _read_on(self) -> None:
        """Handles some of the received bytes; the rest waits until other connections have had their turn."""
        self._has_turn, left, num_frames = False, _TURN_BYTES, 0
        while self._received and left > 0 and num_frames < _MANY_FRAMES and self._may_handle():
            left -= _SLICE_BYTES
            num_frames += self._handle(bytes(self._received[:_SLICE_BYTES]))
            del self._received[:_SLICE_BYTES]
        if self._has_left:
            self._received.clear()
        self._take_turn()
        self._pause_or_resume()

    def _handle(self, data: bytes) -> int:
        """Returns the number of frames that end in ``data``."""
        self._frames.receive_data(data)
        events = self._frames.events_received()
        for event in events:
            if isinstance(event, Frame):
                self._on_frame(event)
        if self._frames.parser_exc is not None:
            self._leave()
            self._in(_CLOSE_SECONDS, "close", self.transport.close)
        self._flush()
        return len(events)

    def _on_frame(self, frame: Frame) -> None:
        self._heard = self._loop.time()
        if frame.opcode not in _MESSAGES or (len(frame.data) < SMALL_BYTES and not frame.fin):
            self._count_small()
        if frame.opcode is Opcode.CLOSE:
            self._leave()
        elif frame.opcode in _MESSAGES and not self._has_left:
            if frame.opcode is not Opcode.CONT:
                self._is_text = frame.opcode is Opcode.TEXT
                self._in(self._limits.body_timeout, "message", self._message_is_late)
            self._message += frame.data
            if frame.fin:
                self._take_message()

    def _count_small(self) -> None:
        past = (self._heard - self._small_at) * SMALL_FRAMES_PER_SECOND
        self._num_small = max(0.0, self._num_small - past) + 1
        self._small_at = self._heard
        if self._num_small > MAX_SMALL_FRAMES and not self._has_left:
            self._fail(1008, "too many small frames")

    def _take_message(self) -> None:
        self._cancel("message")
        data, self._message = bytes(self._message), bytearray()
        if not self._is_open:
            return  # a close frame has been sent
        if not self._is_text:
            self._inbox.put_nowait({"type": "websocket.receive", "bytes": data})
            return
        try:
            self._inbox.put_nowait({"type": "websocket.receive", "text": data.decode()})
        except UnicodeDecodeError:
            self._fail(1007, "the message is not UTF-8")

    def eof_received(self) -> None:
        self._frames.receive_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        for name in list(self._timers):
            self._cancel(name)
        self._leave()
        self._writable.set()

    def _leave(self) -> None:
        """Ends the connection: the client has disconnected, or its data is invalid."""
        self._is_open = False
        if not self._has_left:
            self._has_left = True
            self._inbox.put_nowait({"type": "websocket.disconnect", "code": self._frames.close_code or 1006})

    def _pause_or_resume(self) -> None:
        """Pauses reading while received bytes or messages wait to be handled."""
        wanted = self._has_left or (not self._received and self._may_handle())
        if wanted == self._is_reading or self.transport.is_closing():
            return
        self._is_reading = wanted
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    # ---------------------------------------------------------------- bytes out

    def _flush(self) -> None:
        for data in self._frames.data_to_send():
            if self.transport.is_closing():
                return
            if data:
                self.transport.write(data)
            elif self._frames.close_rcvd is None and self.transport.can_write_eof():
                # A client that still sends would see a reset instead of the reason.
                self.transport.write_eof()
            else:
                self.transport.close()

    def _refuse(self, response: Response) -> None:
        self.transport.write(response.serialize())
        self.transport.close()

    def _close(self, code: int, reason: str) -> None:
        self._is_open = False
        if self._frames.state is State.OPEN:
            self._frames.send_close(code, reason)
        self._flush()
        self._in(_CLOSE_SECONDS, "close", self.transport.close)

    def _fail(self, code: int, reason: str) -> None:
        self._leave()
        self._frames.fail(code, reason)
        self._flush()
        self._in(_CLOSE_SECONDS, "close", self.transport.close)

    def pause_writing(self) -> None:
        self._writable.clear()
        self._in(WRITE_TIMEOUT_SECONDS, "write", self.transport.abort)
        self._pause_or_resume()  # otherwise answers to pings would accumulate

    def resume_writing(self) -> None:
        self._cancel("write")
        self._writable.set()
        self._take_turn()
        self._pause_or_resume()

    # ---------------------------------------------------------------- time

    def _in(self, seconds: float, name: str, action: Any) -> None:
        self._cancel(name)
        self._timers[name] = self._loop.call_later(seconds, action)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _message_is_late(self) -> None:
        self._fail(1008, "the message did not arrive in time")

    def _ping(self) -> None:
        """Sends a ping every ``PING_SECONDS``; drops a client that has been silent for too long."""
        if not self._is_open:
            return
        if self._loop.time() - self._heard > SILENCE_SECONDS:
            self._fail(1011, "no answer to pings")
            return
        if self._writable.is_set():
            self._frames.send_ping(b"")
            self._flush()
        self._in(PING_SECONDS, "ping", self._ping)

    # ---------------------------------------------------------------- ASGI

    async def receive(self) -> Message:
        if not self._inbox.empty():  # let other connections handle their messages between these
            await self._turns.wait(self._loop)
        message = await self._inbox.get()
        self._take_turn()
        self._pause_or_resume()
        return message

    async def send(self, message: Message) -> None:
        """Sends an ASGI message. Waits while the client does not read. Raises ``ClientDisconnect``."""
        await self._writable.wait()
        kind = message["type"]
        if self._has_left or self.transport.is_closing():
            raise ClientDisconnect
        if kind == "websocket.accept":
            self._accept(message.get("headers", ()))
        elif kind == "websocket.send":
            self._frames.send_text(message["text"].encode())
            self._flush()
        elif kind == "websocket.close":
            self._close(message.get("code", 1000), message.get("reason") or "")
        elif kind == "websocket.http.response.start":
            self._refusal = (message["status"], list(message["headers"]))
        elif self._refusal is not None:  # error responses are sent in one piece
            self._refuse(_response(*self._refusal, message.get("body", b"")))

    def _accept(self, headers: Any) -> None:
        assert self._accepted is not None
        for name, value in headers:
            self._accepted.headers[name.decode("latin-1")] = value.decode("latin-1")
        self._frames.send_response(self._accepted)
        self._accepted = None
        self._is_open = True
        self._heard = self._loop.time()
        self._in(PING_SECONDS, "ping", self._ping)
        self._flush()
        self._take_turn()
        self._pause_or_resume()


def _handshake(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Returns a head with only the headers that the library needs, since it limits header lines itself."""
    kept = [
        b"%s: %s\r\n" % (name, value)
        for name, value in headers
        if name in _HANDSHAKE or name.startswith(b"sec-websocket-")
    ]
    return b"".join([b"GET / HTTP/1.1\r\n", *kept, b"\r\n"])
