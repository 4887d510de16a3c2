"""LocalClient: an EngineClient whose engine runs in a separate thread of this process.

The thread owns the engine. Between two steps it takes requests and aborts from a queue, and passes each
step's chunks to the event loop in one call. The event loop owns streams and counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from chorale.client.admission import capacity
from chorale.client.base import Core, EngineInfo, EngineStatus
from chorale.client.in_flight import InFlightRequests
from chorale.client.stream import RequestStream
from chorale.config.engine import ServerConfig
from chorale.engine.commands import Command, Outcome
from chorale.engine.types import NOBODY, EngineStats, GenerateRequest, Owner, TokenChunk
from chorale.errors import EngineDeadError, EngineError
from chorale.serve.engine.loop import run_engine_loop

# A submission; a request (or one choice of it) to abort; None: stop.
Message = GenerateRequest | tuple[str, int | None] | None


class LocalClient:
    """See ``client.base.EngineClient``. Another event loop may be used once nothing is in flight."""

    def __init__(self, core: Core, info: EngineInfo, *, max_queued_requests: int | None = None) -> None:
        """``max_queued_requests``: choices that may wait in addition to ``max_num_seqs``; None: four
        times ``max_num_seqs``."""
        self._core, self._info = core, info
        self._in_flight = InFlightRequests(time.monotonic)
        limits = ServerConfig(max_queued_requests=max_queued_requests)
        self._in_flight.admission.set_capacity(capacity(limits, info.max_num_seqs))
        self._status = EngineStatus("ready")
        self._stats = core.stats()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._arrived: list[Message] = []  # messages that ``wait`` took from the queue
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="chorale-engine", daemon=True)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def status(self) -> EngineStatus:
        return self._status

    @property
    def stats(self) -> EngineStats:
        return self._stats

    async def check_grammar(self, grammar: str) -> str | None:
        return await asyncio.wrap_future(self._core.check_grammar(grammar))

    async def control(self, command: Command) -> Outcome:
        """In the caller's thread: only while no request runs."""
        return await asyncio.wrap_future(self._core.control(command))

    @property
    def engines(self) -> tuple[LocalClient, ...]:
        return (self,)

    @property
    def num_in_flight(self) -> int:
        return self._in_flight.num_in_flight

    def reserve(self, num_choices: Mapping[str, int], owner: Owner = NOBODY) -> None:
        self._require_engine()
        self._in_flight.admission.reserve(num_choices, owner)

    def release(self, request_ids: Iterable[str]) -> None:
        self._in_flight.admission.release(request_ids)

    def _require_engine(self) -> None:
        if self._status.state != "ready":
            raise EngineDeadError(self._status.message or "the engine has stopped")

    def submit(self, request: GenerateRequest) -> RequestStream:
        self._require_engine()
        if not len(self._in_flight):
            self._loop = asyncio.get_running_loop()
        stream = self._in_flight.admit(request, self._left)
        if self._thread.ident is None:
            self._thread.start()
        self._messages.put(request)
        return stream

    def abort(self, request_id: str) -> None:
        if self._in_flight.abort(request_id):
            self._messages.put((request_id, None))

    async def close(self) -> None:
        """Stop the engine's thread after its current step. Requests in flight fail. Idempotent."""
        if self._status.state == "draining":
            return
        alive = self._status.state == "ready"
        self._status = EngineStatus("draining", message="the engine was shut down")
        self._messages.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        if alive:
            self._in_flight.fail_all(lambda: EngineDeadError("the engine was shut down"))
        self._core.shutdown()

    def _left(self, request_id: str, index: int | None) -> None:
        """Called when a consumer closes its stream early, or leaves one choice of it."""
        if self._in_flight.leave(request_id, index):
            self._messages.put((request_id, index))

    # ------------------------------------------------------------------ on the event loop

    def _deliver(self, chunks: list[TokenChunk], stats: EngineStats) -> None:
        self._stats = stats
        self._in_flight.deliver(chunks)

    def _fail(self, message: str) -> None:
        if self._status.state == "ready":
            self._status = EngineStatus("failed", message=message)
            self._in_flight.fail_all(lambda: EngineDeadError(message))

    # ------------------------------------------------------------------ in the engine's thread

    def _run(self) -> None:
        """Run the engine loop. If it fails, end every stream with the error."""
        try:
            run_engine_loop(self._core, self)
        except EngineError as error:
            self._call(self._fail, f"the engine failed: {error.message}")
        except Exception as error:  # without this, every stream would hang
            self._call(self._fail, f"the engine failed ({type(error).__name__}: {error})")

    def receive(self, core: Core) -> bool:
        while True:
            if self._arrived:
                message = self._arrived.pop()
            elif self._messages.empty():
                return True
            else:
                message = self._messages.get_nowait()
            if message is None:
                return False
            if isinstance(message, GenerateRequest):
                core.add_request(message)
            else:
                core.abort(*message)

    def wait(self, timeout: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._arrived.append(self._messages.get(timeout=timeout))

    def step(self, core: Core) -> None:
        chunks = core.step()
        if chunks:
            self._call(self._deliver, chunks, core.stats())

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """Run ``function`` on the event loop, unless the loop is closed."""
        loop = self._loop
        assert loop is not None
        if not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop was closed in between
                loop.call_soon_threadsafe(function, *args)
