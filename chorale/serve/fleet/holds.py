"""Holds: calls that tell Ray Serve which requests are running on an engine.

Tokens do not pass through Ray, which takes 0.2 ms for each item of a stream: an engine generates tens of
thousands of tokens per second. Instead, each request has one call of ``Engine.hold``, which runs until the
request ends, so that Ray can route, limit, count and drain requests. A front ends the call with a message.
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
PING = 0.25  # seconds between two pings of a front
TICK = 0.5  # seconds between two checks for silent fronts
EARLY = 60.0  # seconds for which an end is remembered that arrived before its call


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Message of a front: these requests have ended. Without names it is a ping."""

    front: str
    names: list[str] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ended).decode


class HoldServer:
    """The engine's side. Listens on a random port of ``host`` (see ``endpoint``). Use on one event loop only.
    If a front is silent for ``timeout`` seconds, its calls end."""

    def __init__(
        self,
        host: str,
        secret_key: str,
        timeout: float = HEARTBEAT_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout, self._clock = timeout, clock
        self._held: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._early: dict[tuple[str, str], float] = {}  # times of ends that arrived before their calls
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
        """Returns when ``front`` reports the end of its request ``name``, or is silent for too long."""
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
        """End the calls of silent fronts, and forget old ends whose calls never arrived."""
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
            await asyncio.sleep(TICK)
            self._drain()  # read all messages before checking for silence
            self.tick()

    def close(self) -> None:
        self._ticker.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()


class HoldClient:
    """The front's side: tells engines which requests have ended. Use on one event loop only."""

    def __init__(self) -> None:
        self.front = uuid.uuid4().hex[:16]
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}  # by member name
        self._ended: dict[str, list[str]] = {}  # unsent ends by member name
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
        """Close the connections to all members that are not in ``members``."""
        for member in self._sockets.keys() - members:
            self._sockets.pop(member).close()

    def ended(self, member: str, name: str) -> None:
        """Queue the end of a request. Ends are sent together, since one step may end many requests."""
        self._ended.setdefault(member, []).append(name)
        if not self._is_called:
            self._is_called = True
            self._loop.call_soon(self._flush)

    def ended_anywhere(self, name: str) -> None:
        """Queue the end of a request for every engine."""
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
