"""EngineServerSocket: receives messages from clients, tracks who owns each request, and delivers tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import zmq

from chorale.client.wire import curve
from chorale.client.wire.curve import TcpSocket
from chorale.client.wire.messages import (
    DECODE_ERRORS,
    ClientExpired,
    Controlled,
    EngineFailed,
    EngineUpdate,
    FromEngine,
    GrammarChecked,
    Ping,
    PrefixSnapshot,
    Refused,
    StepMessage,
    ToEngine,
    decode_to_engine,
    encode,
    engine_address,
)
from chorale.engine.commands import Outcome
from chorale.engine.types import (
    BlockChanges,
    EngineStats,
    GenerateRequest,
    PrefixIndexState,
    StepOutputs,
    TokenChunk,
)
from chorale.machine.processes import Silence

logger = logging.getLogger(__name__)
FAILURE_LINGER_MS = 500  # time to send the last messages when the socket is closed


@dataclass(slots=True)
class _Owner:
    """The owner of one request: its client, and the number of choices that have not ended."""

    client: bytes
    num_open: int


@dataclass(slots=True)
class _Follower:
    """A client that follows the prefix index: its requests since then, and the last numbers sent to it."""

    num_received: int = 0
    last: tuple[int, ...] = ()


class EngineServerSocket:
    """Owns the ROUTER socket. Only for the main thread. ``on_orphans`` gets the requests of a lost client."""

    def __init__(
        self,
        directory: str,
        engine_id: str,
        *,
        client_timeout: float,
        on_orphans: Callable[[list[str]], None],
        wake_fd: int | None = None,
        tcp: TcpSocket | None = None,
    ) -> None:
        self._engine_id, self._client_timeout = engine_id, client_timeout
        self._on_orphans = on_orphans
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a vanished client raises
        self._router.setsockopt(zmq.SNDHWM, 0)  # a slow client must not delay the others' steps
        self._router.setsockopt(zmq.RCVHWM, 0)
        self._router.setsockopt(zmq.LINGER, FAILURE_LINGER_MS)
        curve.bind(self._router, engine_address(directory), tcp)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        if wake_fd is not None:
            self._poller.register(wake_fd, zmq.POLLIN)
        self._clients: dict[bytes, Silence] = {}
        self._owners: dict[str, _Owner] = {}
        self._followers: dict[bytes, _Follower] = {}

    # ------------------------------------------------------------------ in

    def wait(self, timeout: float) -> None:
        """Block until a message or a signal arrives, for at most ``timeout`` seconds."""
        self._poller.poll(round(timeout * 1000))

    def receive(self) -> Iterator[tuple[bytes, ToEngine]]:
        """Yields each message that has arrived, with the client that sent it."""
        while True:
            try:
                client, data = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                logger.error("dropped a message that does not have two parts")
                continue
            now = time.monotonic()
            self._clients.setdefault(client, Silence(None, now)).hear(now)
            try:
                message = decode_to_engine(data)
            except DECODE_ERRORS as error:
                logger.error("dropped a client's message that cannot be decoded: %s", error)
                continue
            if isinstance(message, Ping) and message.pid:
                self._clients[client].pid = message.pid
            yield client, message

    def own(self, client: bytes, request_id: str, num_choices: int) -> bool:
        """Record the client of a request. Returns False if a request in flight has the same id."""
        if request_id in self._owners:
            return False
        self._owners[request_id] = _Owner(client, num_choices)
        return True

    def owns(self, client: bytes, request_id: str) -> bool:
        owner = self._owners.get(request_id)
        return owner is not None and owner.client == client

    def disown(self, request_id: str) -> None:
        """Forget a request that the engine did not accept."""
        del self._owners[request_id]

    def drop(self, client: bytes) -> None:
        """Forget a client that has disconnected or vanished, and its requests."""
        self._clients.pop(client, None)
        self._followers.pop(client, None)
        orphans = [request_id for request_id, owner in self._owners.items() if owner.client == client]
        for request_id in orphans:
            del self._owners[request_id]
        if orphans:
            self._on_orphans(orphans)

    def expire_silent_clients(self) -> None:
        """Drop clients that were silent for too long. Call ``receive`` first: it reads the pings that arrived
        during a long step."""
        now, limit = time.monotonic(), self._client_timeout
        for client in [client for client, silence in self._clients.items() if silence.exceeds(now, limit)]:
            message = f"the server process was silent for {self._client_timeout:.0f} s"
            logger.warning("%s: its requests are aborted", message)
            # A client that was only suspended would otherwise wait forever for these tokens.
            self._send(client, ClientExpired(self._engine_id, message))
            self.drop(client)

    # ------------------------------------------------------------------ out

    def deliver(self, chunks: list[TokenChunk], stats: EngineStats) -> None:
        """Send each client its chunks of this step, in one message."""
        for client, own in self._by_client(chunks).items():
            self._send(client, StepMessage(self._engine_id, StepOutputs(own, stats)))

    def follow(self, client: bytes, index: PrefixIndexState, stats: EngineStats) -> None:
        """Send a client the prefix index; ``update_followers`` sends later changes."""
        self._followers[client] = _Follower()
        self._send(client, PrefixSnapshot(self._engine_id, index, stats))

    def received_from(self, client: bytes) -> None:
        """Count a request of a client, which is told how many of its requests have arrived."""
        follower = self._followers.get(client)
        if follower is not None:
            follower.num_received += 1

    @property
    def has_followers(self) -> bool:
        return bool(self._followers)

    def update_followers(self, changes: BlockChanges | None, stats: EngineStats) -> None:
        """Send changes to the followers. Call before ``deliver``: a client should know the blocks that a
        request leaves before it gets the answer."""
        for client, follower in list(self._followers.items()):
            numbers = (follower.num_received, stats.num_running, stats.num_waiting, stats.prompt_tokens_left)
            if changes is not None or numbers != follower.last:
                follower.last = numbers
                self._send(client, EngineUpdate(self._engine_id, stats, follower.num_received, changes))

    def _by_client(self, chunks: list[TokenChunk]) -> dict[bytes, list[TokenChunk]]:
        owners, found = self._owners, dict[bytes, list[TokenChunk]]()
        for chunk in chunks:
            owner = owners.get(chunk.request_id)
            if owner is None:
                continue
            own = found.get(owner.client)
            if own is None:
                own = found[owner.client] = []
            own.append(chunk)
            if chunk.finish_reason is not None:
                owner.num_open -= 1
                if owner.num_open <= 0:
                    del owners[chunk.request_id]
        return found

    def refuse(self, client: bytes, request: GenerateRequest, reason: str, stats: EngineStats) -> None:
        """End a request that the engine did not accept, with an error for each choice."""
        chunks = [
            TokenChunk(request.request_id, index, [], finish_reason="error", error=reason)
            for index in range(request.sampling.n)
        ]
        self._send(client, StepMessage(self._engine_id, StepOutputs(chunks, stats)))

    def refuse_for_now(self, client: bytes, request_id: str, reason: str) -> None:
        """Tell a client that the engine did not accept a request, which may be sent again later."""
        self._send(client, Refused(self._engine_id, request_id, reason))

    def answer_command(self, client: bytes, number: int, future: Future[Outcome], stats: EngineStats) -> None:
        """Answer a ``Control``."""
        error = future.exception()
        outcome = future.result() if error is None else None
        refusal = "" if error is None else str(error)
        self._send(client, Controlled(self._engine_id, number, stats, outcome, refusal))

    def answer_check(self, client: bytes, number: int, reason: str | None) -> None:
        """Answer a ``CheckGrammar``. ``reason``: why the grammar cannot be used, or None."""
        self._send(client, GrammarChecked(self._engine_id, number, reason))

    def announce_failure(self, message: str) -> None:
        """Tell every client that this engine has failed."""
        for client in list(self._clients):
            self._send(client, EngineFailed(self._engine_id, message))

    def _send(self, client: bytes, message: FromEngine) -> None:
        try:
            self._router.send_multipart([client, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("a client has disconnected (%s): its requests are aborted", error)
            self.drop(client)

    def close(self) -> None:
        self._router.close()
        self._context.term()
