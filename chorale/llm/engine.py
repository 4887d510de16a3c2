"""OfflineEngine: the engine core, stepped by the thread that calls ``LLM``.

There is no other thread, event loop or queue between a step and its tokens. A second busy thread would take
the interpreter lock from the step loop for up to ``sys.getswitchinterval`` (5 ms) at a time, longer than most
steps take.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from chorale.client.base import Core, EngineInfo
from chorale.engine.types import EngineStats, GenerateRequest, TokenChunk
from chorale.errors import EngineDeadError, EngineError
from chorale.llm.signals import SignalsBetweenSteps
from chorale.machine.processes import quiet_collector

_QUIET = 1.0  # seconds without work after which an engine uses its idle time
_PIECE = 0.001  # seconds between two pieces of it
FIRST_TOKENS = 8_192  # of prompts, queued before the first step: as many as it computes by default

# Takes a step's chunks; returns further requests, and choices (request id, index) that need no more tokens.
Take = Callable[[list[TokenChunk]], Iterable[GenerateRequest | tuple[str, int]]]


class EventSink(Protocol):
    """Publishes the core's KV events: ``serve.engine.kv_publisher.KvEventPublisher``."""

    def collect(self) -> None: ...

    def close(self) -> None: ...


class OfflineEngine:
    """One call of ``run`` at a time: a call from another thread waits until the first has ended.

    A separate thread uses the engine's idle time while nothing runs, and sleeps otherwise.
    """

    def __init__(self, core: Core, info: EngineInfo, events: EventSink | None = None) -> None:
        """``events`` collects what each step recorded."""
        self.info = info
        self._core = core
        self._events = events
        self._lock = threading.Lock()  # held by the thread that calls the core
        self._owner: int | None = None  # that thread, while it runs requests
        self._quiet_until = time.monotonic() + _QUIET  # one call often follows another at once
        self._failure = ""  # why no request can run any more
        self._closing = threading.Event()
        self._at_rest = threading.Event()
        self._at_rest.set()
        self._idler = threading.Thread(target=self._use_idle_time, name="chorale-idle", daemon=True)
        self._idler.start()

    def stats(self) -> EngineStats:
        """Return counters since the engine was built. For the thread that runs requests."""
        return self._core.stats()

    def run(self, requests: Iterable[GenerateRequest], take: Take) -> None:
        """Run ``requests`` until all of them have ended; ``take`` gets the chunks of each step.

        Signal handlers of Python, Ctrl-C's among them, run between two steps. If one of them or ``take``
        raises, the requests are aborted and the engine can be used again. Raises ``EngineDeadError`` if
        the engine fails, has failed or is shut down, ``RuntimeError`` if ``take`` itself calls ``run``.
        """
        if self._owner == threading.get_ident():
            raise RuntimeError("LLM was called again from within a call that is still running")
        with self._lock:
            self.require_ready()
            self._owner = threading.get_ident()
            self._at_rest.clear()
            try:
                with quiet_collector(), SignalsBetweenSteps() as signals:
                    self._run(requests, take, signals)
            finally:
                self._owner = None
                self._quiet_until = time.monotonic() + _QUIET
                self._at_rest.set()

    def require_ready(self) -> None:
        """Raises ``EngineDeadError`` if the engine has failed or was shut down."""
        if self._closing.is_set():
            raise EngineDeadError("the engine was shut down")
        if self._failure:
            raise EngineDeadError(self._failure)

    def close(self) -> None:
        """Stop the engine and free its memory; requests that run in another thread fail. Idempotent."""
        if self._owner == threading.get_ident():
            raise RuntimeError("LLM cannot be shut down from within a call that is still running")
        if self._closing.is_set():
            return
        self._closing.set()
        with self._lock:
            self._core.shutdown()
            if self._events is not None:
                self._events.close()
            self._at_rest.set()
        self._idler.join()

    # ------------------------------------------------------------------ one run

    def _run(self, requests: Iterable[GenerateRequest], take: Take, signals: SignalsBetweenSteps) -> None:
        core, submitted = self._core, list[str]()
        waiting = iter(requests)
        try:
            more = self._add(waiting, submitted, FIRST_TOKENS)
            while core.has_work or more:
                chunks = self._step()
                if more:  # a GPU computes the first step meanwhile
                    more = self._add(waiting, submitted)
                for order in take(chunks):
                    if isinstance(order, GenerateRequest):
                        submitted.append(order.request_id)
                        core.add_request(order)
                    else:
                        core.abort(*order)
                if signals.pending:
                    signals.deliver()
                if self._closing.is_set():
                    raise EngineDeadError("the engine was shut down")
        except BaseException:
            self._abandon(submitted)
            raise

    def _add(self, requests: Iterator[GenerateRequest], submitted: list[str], most: float = math.inf) -> bool:
        """Queue requests until their prompts have ``most`` tokens. Returns whether there may be more."""
        tokens = 0
        for request in requests:
            submitted.append(request.request_id)
            self._core.add_request(request)
            tokens += len(request.prompt_token_ids)
            if tokens >= most:
                return True
        return False

    def _step(self) -> list[TokenChunk]:
        """Run one step. Raises ``EngineDeadError`` for any exception, which leaves the engine in an unknown
        state."""
        try:
            chunks = self._core.step()
            if self._events is not None:
                self._events.collect()
            return chunks
        except EngineError as error:
            self._failure = f"the engine failed: {error.message}"
            raise EngineDeadError(self._failure) from error
        except BaseException as error:
            self._failure = f"the engine failed: {type(error).__name__} in the middle of a step"
            raise

    def _abandon(self, request_ids: list[str]) -> None:
        """Abort the requests in flight, and let the device finish its current step."""
        core = self._core
        if self._failure:
            return
        for request_id in request_ids:
            core.abort(request_id)
        with contextlib.suppress(EngineDeadError):
            while core.has_work:
                self._step()

    # ------------------------------------------------------------------ between runs

    def _use_idle_time(self) -> None:
        """Prepare, piece by piece, what the engine has not needed yet, while no request runs."""
        while True:
            self._at_rest.wait()
            if self._closing.wait(max(_PIECE, self._quiet_until - time.monotonic())):
                return
            if time.monotonic() >= self._quiet_until:
                self._prepare_piece()

    def _prepare_piece(self) -> None:
        """Prepare one piece. If there is no more, the thread waits for the end of the next run."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._closing.is_set() and (self._failure or not self._core.use_idle_time()):
                self._at_rest.clear()
        except EngineError as error:
            self._failure = f"the engine failed: {error.message}"
            self._at_rest.clear()
        finally:
            self._lock.release()
