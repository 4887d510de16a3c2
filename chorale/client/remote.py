"""RemoteClient: the EngineClient whose engine is another process, reached over ipc or TCP sockets.

Its state follows the engine's heartbeats (``wire.Heartbeat``) and the end of the connection:

    loading ──beat "ready"──► ready ──socket closed, or silence──► dead ──beat of a new engine──► loading ...

When the engine dies, every stream fails at once with ``EngineDeadError``. A new engine process has a new
``engine_id``; messages from and for an older one are ignored.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chorale.client.admission import NO_LIMITS, Admission, capacity
from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.in_flight import InFlightRequests
from chorale.client.routing.follower import Follower
from chorale.client.stream import ChunkSink, RequestStream
from chorale.client.summary import without_gauges
from chorale.client.wire.connection import EngineConnection
from chorale.client.wire.messages import (
    Abort,
    CheckGrammar,
    ClientExpired,
    Control,
    Controlled,
    EngineAddress,
    EngineFailed,
    EngineUpdate,
    FollowBlocks,
    FromEngine,
    GrammarChecked,
    Heartbeat,
    Ping,
    PrefixSnapshot,
    Refused,
    Submit,
    Unregister,
    local_address,
)
from chorale.config.engine import ServerConfig
from chorale.engine.commands import Command, Outcome
from chorale.engine.types import NOBODY, EngineStats, GenerateRequest, Owner
from chorale.errors import (
    ChoraleError,
    ConflictError,
    EngineDeadError,
    EngineLoadingError,
    EnginePausedError,
    RequestTimeoutError,
)
from chorale.machine.processes import HEARTBEAT_TIMEOUT, LOADING_TIMEOUT, Silence
from chorale.machine.tasks import end_tasks

MIN_RETRY_AFTER = 1.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Time limits of a client, and bounds on unread tokens."""

    ping_interval: float = 0.5  # must be below EngineStart.client_timeout, or the engine drops the client
    # Without a heartbeat for this long, a ready engine counts as dead. None: twice the time after which the
    # engine's own monitor replaces it.
    engine_silence: float | None = None
    max_pending_tokens: int = 4096  # the reader of a request with more unread tokens is slow
    slow_reader_patience: float = 60.0  # a request is aborted if its reader is slow for this long


class RemoteClient:
    """An ``EngineClient``; see ``client.base``. Not thread-safe: everything happens on one event loop.

    Call ``start()`` on that loop before the first ``submit``, and ``await close()`` at the end.
    ``where`` is the folder of the engine's sockets, or their address; the engine may start later, die and
    come back. ``FleetClient`` passes ``admission`` and ``follower``: then this client follows its engine's
    prefix index, and the fleet admits requests.
    """

    def __init__(
        self,
        where: str | Path | EngineAddress,
        *,
        queue: ServerConfig = NO_LIMITS,
        limits: ClientLimits | None = None,
        on_status: Callable[[EngineStatus], None] | None = None,
        engine: int = 0,
        admission: Admission | None = None,
        follower: Follower | None = None,
    ) -> None:
        self._engine, self._follower, self._owns_admission = engine, follower, admission is None
        self._limits = limits or ClientLimits()
        self._on_status = on_status
        self._in_flight = InFlightRequests(time.monotonic, admission or Admission(time.monotonic, queue))
        self._connection = EngineConnection(
            where if isinstance(where, EngineAddress) else local_address(where),
            on_heartbeat=self._heartbeat,
            on_message=self._message,
            on_gone=self._engine_gone,
        )
        self._status = EngineStatus("loading", phase="start")
        self._info: EngineInfo | None = None
        self._restarts = 0  # as in the last heartbeat
        self._stats = EngineStats()
        self._engine_id = ""  # id of the engine that requests are sent to; "" while there is none
        self._died_id = ""  # id of an engine that reported its failure, but may still send heartbeats
        self._is_local = self._connection.is_local
        self._timeout = HEARTBEAT_TIMEOUT
        self._silence = Silence(None, time.monotonic())
        self._died_at: float | None = None
        self._restart_seconds = MIN_RETRY_AFTER  # duration of the most recent restart
        self._ticker: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._questions: dict[int, asyncio.Future[Any]] = {}  # unanswered checks and commands, by number
        self._has_task = False  # the engine has announced a long task

    # ------------------------------------------------------------------ EngineClient

    @property
    def engines(self) -> tuple[RemoteClient, ...]:
        return (self,)

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineLoadingError("the engine is loading", retry_after=MIN_RETRY_AFTER)
        return self._info

    @property
    def status(self) -> EngineStatus:
        return self._status

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def num_in_flight(self) -> int:
        return self._in_flight.num_in_flight

    def reserve(self, num_choices: Mapping[str, int], owner: Owner = NOBODY) -> None:
        self.require_engine()
        self._in_flight.admission.reserve(num_choices, owner)

    def release(self, request_ids: Iterable[str]) -> None:
        self._in_flight.admission.release(request_ids)

    def submit(self, request: GenerateRequest) -> RequestStream:
        self.require_engine()
        stream = self._in_flight.admit(request, self.leave)
        self._connection.send(Submit(self._engine_id, request))
        return stream

    def take(self, request: GenerateRequest, stream: ChunkSink, follower: Follower) -> None:
        """Submit a request that the ``FleetClient`` has admitted."""
        stream.engine = self._engine
        self._in_flight.adopt(stream, request)
        follower.sent(request)
        self._connection.send(Submit(self._engine_id, request))

    async def check_grammar(self, grammar: str) -> str | None:
        reason: str | None = await self._ask(lambda number: CheckGrammar(number, grammar))
        return reason

    async def control(self, command: Command) -> Outcome:
        outcome: Outcome = await self._ask(lambda number: Control(self._engine_id, number, command))
        return outcome

    async def _ask(self, question: Callable[[int], CheckGrammar | Control]) -> Any:
        """Send a question with a new number, and wait for its answer."""
        self.require_engine()
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            self._connection.send(question(number))
            return await answer
        finally:
            del self._questions[number]

    def abort(self, request_id: str) -> None:
        if self._in_flight.abort(request_id):
            self._connection.send(Abort([request_id]))

    async def close(self) -> None:
        """Abort the requests in flight, unregister, and close the sockets. Idempotent."""
        ticker, self._ticker = self._ticker, None
        if ticker is None:
            return
        await end_tasks(ticker)
        self._connection.send(Unregister())
        self._connection.close()
        self._engine_id = ""
        self._end_all(lambda: EngineDeadError("the server is shutting down"))

    # ------------------------------------------------------------------ start and failure

    def start(self) -> None:
        """Open the sockets on the running event loop."""
        self._silence.hear(time.monotonic())
        self._connection.start()
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    def mark_failed(self, message: str) -> None:
        """Called when the supervisor gives up: no engine will be started again."""
        self._lose_engine("failed", message)

    # ------------------------------------------------------------------ messages from the engine

    def _heartbeat(self, beat: Heartbeat) -> None:
        self._timeout, self._restarts, self._has_task = beat.timeout, beat.restarts, bool(beat.task)
        self._silence.pid = beat.pid if self._is_local else None
        self._silence.hear(time.monotonic())
        if beat.state == "failed" and self._status.state != "failed":
            self.mark_failed(beat.message)
        if self._status.state == "failed" or beat.engine_id == self._died_id:
            return
        self._stats = beat.stats
        if beat.state == "loading":
            if self._engine_id:  # a new process; the end of the earlier one went unnoticed
                self._lose_engine("dead", "the engine restarted")
            self._set_status(beat.status)
            return
        if beat.engine_id != self._engine_id and beat.info is not None:
            self._attach(beat.engine_id, beat.info)
        self._set_status(beat.status)

    def _attach(self, engine_id: str, info: EngineInfo) -> None:
        if self._engine_id:
            self._lose_engine("dead", "the engine restarted")
        if self._died_at is not None:
            self._restart_seconds = max(time.monotonic() - self._died_at, MIN_RETRY_AFTER)
            self._died_at = None
        self._engine_id, self._info = engine_id, info
        if self._owns_admission:
            admission = self._in_flight.admission
            admission.set_capacity(capacity(admission.limits, info.max_num_seqs))
        self._connection.connect()
        self._follow()

    def _follow(self) -> None:
        if self._follower is not None:
            self._follower.begin()
            self._connection.send(FollowBlocks())

    def _message(self, message: FromEngine) -> None:
        if message.engine_id != self._engine_id:
            return
        if isinstance(message, EngineFailed):
            self._died_id = message.engine_id
            self._lose_engine("dead", message.message)
            return
        if isinstance(message, ClientExpired):
            self._fail_all(message.message)
            self._follow()
            return
        if isinstance(message, PrefixSnapshot | EngineUpdate):
            self._stats = message.stats
            if self._follower is not None:
                self._follower.receive(message)
            return
        if isinstance(message, GrammarChecked):
            self._answer(message.number, message.reason)
            return
        if isinstance(message, Controlled):
            self._stats = message.stats  # the next heartbeat may take a while
            refusal = ConflictError(message.refusal) if message.outcome is None else None
            self._answer(message.number, message.outcome, refusal)
            return
        if isinstance(message, Refused):
            entry = self._in_flight.remove(message.request_id)
            if entry is not None:
                entry.stream.fail(EnginePausedError(message.reason, retry_after=MIN_RETRY_AFTER))
            return
        self._stats = message.step.stats
        self._in_flight.deliver(message.step.chunks)

    def _answer(self, number: int, value: object, error: ChoraleError | None = None) -> None:
        answer = self._questions.get(number)
        if answer is not None and not answer.done():
            answer.set_result(value) if error is None else answer.set_exception(error)

    def _engine_gone(self) -> None:
        if self._status.state not in ("dead", "failed"):
            self._lose_engine("dead", "the engine process ended")

    def _lose_engine(self, state: Literal["dead", "failed"], message: str) -> None:
        self._engine_id, self._stats = "", without_gauges(self._stats)
        self._connection.disconnect()
        if self._follower is not None:
            self._follower.begin()
        if self._died_at is None:
            self._died_at = time.monotonic()
        self._set_status(EngineStatus(state, message=message, restarts=self._restarts))
        self._fail_all(message)

    def _fail_all(self, message: str) -> None:
        """End every stream with an error and abort its request in the engine, if there is one.

        A request that was sent before ``ClientExpired`` arrived may still run in the engine.
        """
        if request_ids := self._in_flight.ids():
            self._connection.send(Abort(request_ids))
        self._end_all(lambda: EngineDeadError(f"{message}; please retry", retry_after=self._restart_seconds))

    def _end_all(self, error: Callable[[], EngineDeadError]) -> None:
        """End every stream and every unanswered question with an error."""
        self._in_flight.fail_all(error)
        for number in list(self._questions):
            self._answer(number, None, error())

    # ------------------------------------------------------------------ internals

    def require_engine(self) -> None:
        """Raises ``EngineLoadingError`` or ``EngineDeadError`` if no engine is ready."""
        if self._engine_id:
            return
        if self._status.state == "loading":
            raise EngineLoadingError("the engine is loading", retry_after=self._restart_seconds)
        message = self._status.message or "no engine is running"
        raise EngineDeadError(message, retry_after=self._restart_seconds)

    def leave(self, request_id: str, index: int | None) -> None:
        """Called when a consumer closes its stream early, or leaves one choice of it."""
        if self._in_flight.leave(request_id, index):
            self._connection.send(Abort([request_id], index))

    @property
    def silence_limit(self) -> float:
        """Returns the seconds of silence after which the engine counts as dead."""
        if self._has_task:
            return 2 * LOADING_TIMEOUT
        return self._limits.engine_silence or 2 * self._timeout

    @property
    def is_known(self) -> bool:
        """Returns whether the engine has been ready at least once."""
        return self._info is not None

    def _set_status(self, status: EngineStatus) -> None:
        if status != self._status:
            self._status = status
            self._notify()

    def _notify(self) -> None:
        if self._on_status is not None:
            self._on_status(self.status)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._limits.ping_interval)
            # The loop may have been blocked: read pending heartbeats before checking the engine's silence.
            self._connection.drain_heartbeats()
            if self._owns_admission:
                self._in_flight.admission.tick()
            self._connection.send(Ping(os.getpid() if self._is_local else 0))
            self._abort_slow_readers()
            if self._silence.exceeds(time.monotonic(), self.silence_limit) and self._engine_id:
                silence = self._silence.seconds
                self._lose_engine("dead", f"the engine has been silent for {silence:.0f} s")

    def _abort_slow_readers(self) -> None:
        limits = self._limits
        for request_id in self._in_flight.slow_readers(
            limits.max_pending_tokens, limits.slow_reader_patience
        ):
            entry = self._in_flight.remove(request_id)
            if entry is not None:
                self._connection.send(Abort([request_id]))
                message = "the response was not read fast enough"
                entry.stream.fail(RequestTimeoutError(message, code="slow_reader"))
