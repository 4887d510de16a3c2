"""OfflineEngine: the engine core, stepped by the thread that calls ``LLM``.

The thread that runs a step also reads its tokens, without an event loop or queue. A second busy thread would
take the interpreter lock from the step loop for up to ``sys.getswitchinterval`` (5 ms) at a time, longer than
most steps take.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from chorale.client.base import EngineInfo, EngineStatus, EngineView
from chorale.engine.commands import Command, Outcome
from chorale.engine.types import EngineStats, GenerateRequest, TokenChunk
from chorale.errors import EngineDeadError, EngineError
from chorale.machine.processes import quiet_collector

if TYPE_CHECKING:
    from chorale.engine.core import EngineCore
    from chorale.serve.engine.kv_events.publisher import KvEventPublisher

_QUIET = 1.0  # seconds without requests before idle time is used
_PIECE = 0.001  # pause between two pieces of idle work, in seconds
FIRST_TOKENS = 8_192  # prompt tokens queued before the first step, as many as it computes by default

# Takes a step's chunks; returns further requests, and choices (request id, index) that need no more tokens.
Take = Callable[[list[TokenChunk]], Iterable[GenerateRequest | tuple[str, int]]]


# Signals whose handlers may raise: Ctrl-C, termination, and those used for time limits.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


class SignalsBetweenSteps:
    """A context manager that delays signals until ``deliver`` is called: an exception of a handler within a
    step would break the engine.

    If a signal arrives again while it is pending, it is handled at once, because the step may never end.
    Only the main thread handles signals, so in any other thread this does nothing.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> SignalsBetweenSteps:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers and deliver pending signals. Exceptions of the handlers propagate."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._receive:  # else ``take`` has set another handler
                signal.signal(number, handler)
        if self.pending:
            self.deliver()

    def deliver(self) -> None:
        """Call the handlers of pending signals, in order of arrival. Their exceptions propagate."""
        while self.pending:
            number, frame = self.pending.pop(0)
            self._handlers[number](number, frame)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if any(number == other for other, _ in self.pending):
            self._handlers[number](number, frame)
        else:
            self.pending.append((number, frame))


class OfflineEngine:
    """An engine core that runs one call of ``run`` at a time; calls from other threads wait.

    A separate thread uses the engine's idle time while no request runs, and sleeps otherwise.
    """

    status = EngineStatus("ready")

    def __init__(self, core: EngineCore, info: EngineInfo, events: KvEventPublisher | None = None) -> None:
        """``events`` publishes the KV events of each step."""
        self.info = info
        self._core = core
        self._events = events
        self._lock = threading.Lock()  # held by the thread that calls the core
        self._owner: int | None = None  # id of the thread that runs requests
        self._quiet_until = time.monotonic() + _QUIET  # calls often follow each other closely
        self._failure = ""  # reason why no request can run; "" if none
        self._closing = threading.Event()
        self._at_rest = threading.Event()
        self._at_rest.set()
        self._idler = threading.Thread(target=self._use_idle_time, name="chorale-idle", daemon=True)
        self._idler.start()
        atexit.register(self.close)

    @property
    def engines(self) -> Sequence[EngineView]:
        return (self,)

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was built."""
        return self._core.stats()

    def control(self, command: Command) -> Outcome:
        """Execute a command between two calls of ``run``. Raises ``ConflictError`` as the core does,
        ``EngineDeadError`` if the engine fails or has failed, ``RuntimeError`` within a call of ``run``."""
        if self._owner == threading.get_ident():
            raise RuntimeError("the engine cannot be controlled from within a call that is still running")
        with self._lock:
            self.require_ready()
            try:
                done = self._core.control(command)
                while not done.done():
                    self._step()
                return done.result()
            except EngineDeadError:
                raise
            except EngineError as error:
                self._failure = f"the engine failed: {error.message}"
                raise EngineDeadError(self._failure) from error
            finally:
                self._quiet_until = time.monotonic() + _QUIET
                self._at_rest.set()

    def run(self, requests: Iterable[GenerateRequest], take: Take) -> None:
        """Run ``requests`` until all of them have ended; ``take`` gets the chunks of each step.

        Python signal handlers, including the one for Ctrl-C, run between steps. If a handler or ``take``
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
        atexit.unregister(self.close)
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
                if more:  # the first step is running on the GPU
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
        """Queue requests until their prompts have ``most`` tokens. Returns whether requests may be left."""
        tokens = 0
        for request in requests:
            submitted.append(request.request_id)
            self._core.add_request(request)
            tokens += len(request.prompt_token_ids)
            if tokens >= most:
                return True
        return False

    def _step(self) -> list[TokenChunk]:
        """Run one step. Any exception leaves the engine in an unknown state, so it is marked as failed.
        Raises ``EngineDeadError`` for an ``EngineError``."""
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
        """Prepare the engine for later requests, piece by piece, while no request runs."""
        while True:
            self._at_rest.wait()
            if self._closing.wait(max(_PIECE, self._quiet_until - time.monotonic())):
                return
            if time.monotonic() >= self._quiet_until:
                self._prepare_piece()

    def _prepare_piece(self) -> None:
        """Prepare one piece. If nothing is left, the idle thread sleeps until the next run has ended."""
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
