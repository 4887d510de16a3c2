"""EngineConnection: one client's sockets to the engine process, read by the event loop directly.

``zmq.asyncio`` makes a future for each message. Here the loop watches the sockets' descriptors, and one
callback reads everything that has arrived, so a step's message costs one wake-up. Works on asyncio and
uvloop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from chorale.client.wire import curve
from chorale.client.wire.messages import (
    DECODE_ERRORS,
    EngineAddress,
    FromEngine,
    Heartbeat,
    Register,
    ToEngine,
    decode_from_engine,
    decode_heartbeat,
    encode,
)

logger = logging.getLogger(__name__)
Received = TypeVar("Received")
RECONNECT_MS = 50  # a new engine is found within this time after it binds
LINGER_MS = 200  # how long close() waits for aborts and Unregister to be sent


class EngineConnection:
    """Calls ``on_gone`` when the engine process's end of the socket closes, for any reason.

    Callbacks run on the event loop. Messages that arrived earlier are delivered before ``on_gone`` is called.
    """

    def __init__(
        self,
        address: EngineAddress,
        *,
        on_heartbeat: Callable[[Heartbeat], None],
        on_message: Callable[[FromEngine], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._address = address
        self._on_heartbeat, self._on_message, self._on_gone = on_heartbeat, on_message, on_gone
        self._dealer: zmq.Socket[bytes] | None = None

    @property
    def is_local(self) -> bool:
        """Returns whether the engine is on this machine."""
        return not self._address.beats.startswith("tcp:")

    def start(self) -> None:
        """Subscribe to the heartbeats. Must be called on the loop that will run the callbacks."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._heartbeats: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._heartbeats.setsockopt(zmq.LINGER, 0)
        self._heartbeats.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._monitor: zmq.Socket[bytes] = self._heartbeats.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._heartbeats.subscribe(b"")
        curve.enter(self._heartbeats, self._address.public_key)
        self._heartbeats.connect(self._address.beats)
        self._watch(self._heartbeats, self.drain_heartbeats)
        self._watch(self._monitor, self._drain_monitor)

    def connect(self) -> None:
        """Open a new connection for requests; messages queued on an older one are dropped."""
        self.disconnect()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.SNDHWM, 0)  # never block: admission limits the requests in flight
        self._dealer.setsockopt(zmq.RCVHWM, 0)
        curve.enter(self._dealer, self._address.public_key)
        self._dealer.connect(self._address.engine)
        self._watch(self._dealer, self.drain_messages)
        self.send(Register())

    def disconnect(self) -> None:
        dealer, self._dealer = self._dealer, None
        if dealer is not None:
            self._unwatch(dealer)
            dealer.close()

    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine. It is dropped if there is no connection: all streams fail then."""
        if self._dealer is None:
            return
        self._dealer.send(encode(message), zmq.NOBLOCK)
        # The descriptor signals each event once. If sending consumed it, an arrived message would wait.
        if int(self._dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.drain_messages)

    def drain_messages(self) -> None:
        if self._dealer is not None:
            for message in _arrived(self._dealer, decode_from_engine, "message from the engine"):
                self._on_message(message)

    def drain_heartbeats(self) -> None:
        for beat in _arrived(self._heartbeats, decode_heartbeat, "heartbeat"):
            self._on_heartbeat(beat)

    def _drain_monitor(self) -> None:
        gone = False
        while not self._monitor.closed:
            try:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                break
            gone = True
        if gone:
            self.drain_heartbeats()
            self.drain_messages()
            self._on_gone()

    def _watch(self, socket: zmq.Socket[bytes], drain: Callable[[], None]) -> None:
        self._loop.add_reader(socket.fileno(), drain)
        self._loop.call_soon(drain)  # the descriptor does not signal messages that arrived earlier

    def _unwatch(self, socket: zmq.Socket[bytes]) -> None:
        self._loop.remove_reader(socket.fileno())

    def close(self) -> None:
        if self._dealer is not None:
            self._dealer.setsockopt(zmq.LINGER, LINGER_MS)
        self.disconnect()
        self._unwatch(self._monitor)
        self._unwatch(self._heartbeats)
        self._heartbeats.disable_monitor()
        self._monitor.close(0)
        self._heartbeats.close(0)
        self._context.term()  # waits for pending messages, at most LINGER_MS


def _arrived(socket: zmq.Socket[bytes], decode: Callable[[bytes], Received], what: str) -> Iterator[Received]:
    """Yields the messages that have arrived, until none is left or the socket is closed."""
    while not socket.closed:
        try:
            data = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        try:
            message = decode(data)
        except DECODE_ERRORS as error:
            logger.error("dropped a %s that cannot be decoded: %s", what, error)
            continue
        yield message
