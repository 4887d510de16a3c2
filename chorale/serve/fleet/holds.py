"""Holds: the calls by which Ray Serve knows which requests an engine has.

Tokens do not pass through Ray: each item of a stream takes it 0.2 ms, and an engine makes tens of thousands
of tokens a second. For each request one call of the engine's replica runs as long as the request does, so
that Ray can route, limit, scale by and drain requests. A front ends it by a message of some bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

import msgspec
import zmq

from chorale.client.wire import curve
from chorale.machine.processes import HEARTBEAT_TIMEOUT, Silence

logger = logging.getLogger(__name__)
PING = 0.25
LOOK = 0.5  # seconds between two looks for silent fronts
EARLY = 60.0  # seconds that the end of a call is remembered which has not begun


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """From a front: these requests have ended. Empty, it says that the front lives."""

    front: str
    names: list[str] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ended).decode


class HoldDesk:
    """The engine's side. ``host``: the address to listen at; ``endpoint`` says where. One event loop only.
    The calls of a front that is silent for ``timeout`` seconds end."""

    def __init__(
        self,
        host: str,
        secret_key: str,
        timeout: float = HEARTBEAT_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout, self._clock = timeout, clock
        self._held: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._early: dict[tuple[str, str], float] = {}  # ended before they began
        self._fronts: dict[str, Silence] = {}
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        curve.serve(self._socket, secret_key)
        shown = f"[{host}]" if ":" in host else host
        port = self._socket.bind_to_random_port(f"tcp://{shown}")
        self.endpoint = f"tcp://{shown}:{port}"

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._ticker = self._loop.create_task(self._tick_forever())

    @property
    def num_held(self) -> int:
        return len(self._held)

    async def hold(self, front: str, name: str) -> None:
        """Returns when the front says that its request has ended, or is silent for too long."""
        key = (front, name)
        if self._early.pop(key, None) is not None:
            return
        self._fronts.setdefault(front, Silence(None, self._clock()))
        held = self._held[key] = asyncio.get_running_loop().create_future()
        try:
            await held
        finally:
            self._held.pop(key, None)

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self.receive(_decode(data))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.error("dropped a message that cannot be decoded: %s", error)

    def receive(self, message: Ended) -> None:
        now = self._clock()
        self._fronts.setdefault(message.front, Silence(None, now)).hear(now)
        for name in message.names:
            held = self._held.get((message.front, name))
            if held is None:
                self._early[message.front, name] = now
            elif not held.done():
                held.set_result(None)

    def tick(self) -> None:
        """End the calls of fronts that are silent, and forget what never began."""
        now = self._clock()
        dead = {front for front, silence in self._fronts.items() if silence.exceeds(now, self._timeout)}
        for front in dead:
            del self._fronts[front]
        for (front, _), held in self._held.items():
            if front in dead and not held.done():
                held.set_result(None)
        for key in [key for key, since in self._early.items() if now - since > EARLY]:
            del self._early[key]

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            self._drain()  # before judging a silence
            self.tick()

    def close(self) -> None:
        self._ticker.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()


class HoldEnds:
    """The front's side: says to each engine which requests have ended. One event loop only."""

    def __init__(self) -> None:
        self.front = uuid.uuid4().hex[:16]
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}  # by member
        self._ended: dict[str, list[str]] = {}  # not sent yet
        self._is_called = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ticker = self._loop.create_task(self._ping_forever())

    def connect(self, member: str, endpoint: str, public_key: str) -> None:
        if member in self._sockets:
            return
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        curve.enter(socket, public_key)
        socket.connect(endpoint)
        self._sockets[member] = socket
        self._send(member, [])

    def keep(self, members: set[str]) -> None:
        """Close the connections to all others."""
        for member in self._sockets.keys() - members:
            self._sockets.pop(member).close()

    def ended(self, member: str, name: str) -> None:
        """Say so with the next turn of the event loop: a step ends many requests at once."""
        self._ended.setdefault(member, []).append(name)
        if not self._is_called:
            self._is_called = True
            self._loop.call_soon(self._flush)

    def ended_anywhere(self, name: str) -> None:
        """Say so to every engine."""
        for member in self._sockets:
            self.ended(member, name)

    def _flush(self) -> None:
        ended, self._ended, self._is_called = self._ended, {}, False
        for member, names in ended.items():
            self._send(member, names)

    def _send(self, member: str, names: list[str]) -> None:
        socket = self._sockets.get(member)
        if socket is not None:
            socket.send(_encode(Ended(self.front, names)), zmq.NOBLOCK)

    async def _ping_forever(self) -> None:
        while True:
            await asyncio.sleep(PING)
            for member in self._sockets:
                self._send(member, [])

    def close(self) -> None:
        self._ticker.cancel()
        self._flush()
        self.keep(set())
        self._context.term()
