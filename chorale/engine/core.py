"""EngineCore: the step loop. Three verbs: schedule, execute, commit.

Async scheduling is an ordering of the verbs. Without it, a step's result is awaited before the next plan is
made; with it, the next plan is made and executed first, so that the device always has work:

    off   schedule n · execute n · commit n
    on    schedule n + 1 · execute n + 1 · commit n
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from chorale.config.sampling_fields import MAX_CHOICES
from chorale.engine.adapters.queue import AdapterQueue, AdapterService
from chorale.engine.admission import Admission, check_limits
from chorale.engine.commands import Command, DeviceControl, Outcome
from chorale.engine.control import Control
from chorale.engine.engine_state import Drafter, EngineState
from chorale.engine.histogram import STEP_TOKENS, Histogram
from chorale.engine.kv_cache.index_log import IndexLog
from chorale.engine.pending_grammars import PendingGrammarQueue
from chorale.engine.scheduling.scheduler import Scheduler
from chorale.engine.types import (
    EngineLimits,
    EngineStats,
    Executor,
    FetchResult,
    FinishReason,
    GenerateRequest,
    GrammarService,
    PrefixIndexState,
    TokenChunk,
)
from chorale.errors import EngineError


class EngineCore:
    """Requests in, TokenChunks out. Not thread-safe: one thread makes all calls.

    ``add_request`` and ``abort`` never raise on client input; the next ``step`` reports refusals and aborts.
    """

    def __init__(
        self,
        limits: EngineLimits,
        executor: Executor,
        clock: Callable[[], float] = time.time,
        grammars: GrammarService | None = None,
        prefix_secret: bytes = b"",
        drafter: Drafter | None = None,
        device: DeviceControl | None = None,
        adapters: AdapterService | None = None,
    ) -> None:
        """``clock`` returns seconds since the epoch. ``prefix_secret``: the key of the prefix hashes; ""
        draws one. ``drafter``: guesses tokens that steps verify; None: each step samples one token per row.
        ``device``: releases memory and profiles, if that is possible. Without ``grammars`` or ``adapters``,
        requests that need them are refused. Raises ``ConfigError`` for limits that cannot work."""
        check_limits(limits)
        self.limits = limits
        self._executor = executor
        self._clock = clock
        self._adapters = AdapterQueue(adapters, limits.max_loras)
        self._engine = EngineState(limits, drafter, self._adapters)
        self._admission = Admission(limits, self._engine.cache.capacity, prefix_secret)
        self._scheduler = Scheduler(self._engine, limits, drafter)
        self._pending_grammars = PendingGrammarQueue(grammars)
        self._control = Control(
            self._engine,
            self._scheduler,
            device or DeviceControl(),
            self._abort_all,
            is_drained=lambda: not self.has_work,
        )
        self._fetches: deque[FetchResult] = deque()
        self._step_tokens, self._num_done = Histogram.empty(STEP_TOKENS), 0

    # ------------------------------------------------------------------ requests

    def add_request(self, request: GenerateRequest) -> None:
        """Queue a request. A request that cannot be served ends with an ``error`` chunk for each choice. A
        paused engine holds it back until ``control`` resumes it."""
        control, request_id = self._control, request.request_id
        known = (self._engine.requests, self._pending_grammars, self._adapters, control.held)
        if any(request_id in some for some in known):
            refusal: str | None = f"request id {request_id!r} is already in use"
        else:
            refusal = self._admission.refusal(request) or self._adapters.refusal(request.adapter)
        if refusal is None and control.is_paused:
            control.held[request_id] = request
            return
        if refusal is None and request.sampling.grammar:
            refusal = self._pending_grammars.add(request)
        elif refusal is None:
            self._enter(request)
        if refusal is not None:
            self._end_early(request, "error", refusal)

    def check_grammar(self, grammar: str) -> Future[str | None]:
        """Compile a grammar in a thread. The result is None, or the reason why requests cannot use it."""
        return self._pending_grammars.check(grammar)

    def _enter(self, request: GenerateRequest) -> None:
        now = self._clock()
        if self._adapters.admit(request, now):
            self._engine.add_request(self._admission.accept(request, now))

    def _admit_placed(self) -> None:
        """Admit the requests whose adapters have a slot now."""
        for request, refusal in self._adapters.take_ready(self._clock(), wait=self._engine.is_idle):
            if refusal is None:
                self._engine.add_request(self._admission.accept(request, self._clock()))
            else:
                self._end_early(request, "error", refusal)

    def _end_early(self, request: GenerateRequest, finish: FinishReason, error: str | None = None) -> None:
        """End a request that has no sequences yet, with one chunk for each choice."""
        for index in range(max(1, min(request.sampling.n, MAX_CHOICES))):
            self._engine.emit(TokenChunk(request.request_id, index, [], finish_reason=finish, error=error))

    def _admit_compiled(self) -> None:
        """Admit the requests whose grammars are compiled. Waits briefly if there is nothing else to do."""
        for request, refusal in self._pending_grammars.take_ready(wait=self._engine.is_idle):
            if refusal is None:
                self._enter(request)
            else:
                self._end_early(request, "error", refusal)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End every choice of a request now, or only choice ``index``. Its blocks and queue entry are
        released at once; the "abort" chunks come with the next ``step``. Unknown ids and ended choices are
        ignored.
        """
        state = self._engine.requests.get(request_id)
        if state is None:
            held = self._control.held
            if request_id in held and (index is None or held[request_id].sampling.n == 1):
                self._end_early(held.pop(request_id), "abort")
            for queue in (self._pending_grammars, self._adapters):
                if index is None and (pending := queue.remove(request_id)) is not None:
                    self._end_early(pending, "abort")
            return
        if index is None:
            self._engine.end_request(state, "abort", self._clock(), None)
        elif 0 <= index < len(state.sequences):
            self._engine.abort_choice(state.sequences[index], self._clock())

    def _abort_all(self) -> None:
        for state in list(self._engine.requests.values()):
            self._engine.end_request(state, "abort", self._clock(), None)
        for request in (*self._pending_grammars.remove_all(), *self._adapters.remove_all()):
            self._end_early(request, "abort")

    # ------------------------------------------------------------------ administration

    def control(self, command: Command) -> Future[Outcome]:
        """Execute an administrative command. The future has its result at once, unless a pause or sleep has
        to wait: for the step in flight or, with mode "wait", for running requests. ``step`` sets it then.

        Its exception is a ``ConflictError`` if the state or the configuration does not allow the command.
        Raises ``EngineError`` if the device fails; the engine cannot be used any more then.
        """
        future = self._control.execute(command)
        self._enter_held()
        return future

    def _enter_held(self) -> None:
        if self._control.held and not self._control.is_paused:
            held, self._control.held = self._control.held, {}
            for request in held.values():
                self.add_request(request)

    @property
    def refusal(self) -> str:
        """Returns why new requests should be refused: a pause that is not "keep", or lost weights; or ""."""
        return self._control.refusal

    # ------------------------------------------------------------------ the loop

    def step(self) -> list[TokenChunk]:
        """Run the three verbs once. Returns the new chunks, often one for every row.

        Raises ``EngineError`` if the device failed. Every request has then ended with an ``error`` chunk,
        which ``take_chunks`` (or the next ``step``) returns, and the engine is empty. Callers that report the
        failure to their clients themselves need not forward these chunks.
        """
        scheduler, in_flight = self._scheduler, self._engine.in_flight
        is_frozen = self._control.is_frozen
        if self._pending_grammars and not is_frozen:
            self._admit_compiled()
        if self._adapters and not is_frozen:
            self._admit_placed()
        try:
            plan = None if is_frozen else scheduler.schedule(self._clock())
            if plan is not None:
                self._fetches.append(self._executor.execute(plan))
            if len(in_flight) > (1 if plan is not None and self.limits.async_scheduling else 0):
                record, result = in_flight[0], self._fetches.popleft()()
                scheduler.commit(record, result, self._clock())
                self._count(record.plan.num_tokens)
            elif plan is None and self._engine.requests and not is_frozen:
                raise EngineError("requests are waiting, but the scheduler finds nothing to do")
            chunks = self.take_chunks()
            self._control.settle()
            self._enter_held()
        except Exception as error:
            self._fetches.clear()
            self._engine.fail(f"the engine failed: {error}", self._clock())
            pending = *self._pending_grammars.remove_all(), *self._adapters.remove_all()
            for request in (*pending, *self._control.held.values()):
                self._end_early(request, "error", f"the engine failed: {error}")
            self._control.fail()
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"a step failed: {type(error).__name__}: {error}") from error
        return chunks

    def _count(self, num_tokens: int) -> None:
        stats = self._engine.stats
        stats.num_steps += 1
        stats.last_step_tokens = num_tokens
        num_done = stats.prompt_tokens - stats.cached_prompt_tokens + stats.generation_tokens
        if num_done > self._num_done:
            self._step_tokens.observe(num_done - self._num_done)
            self._num_done = num_done

    def take_chunks(self) -> list[TokenChunk]:
        """Return the chunks that ``step`` has not returned yet."""
        return self._engine.take_chunks()

    @property
    def has_work(self) -> bool:
        """Returns whether ``step`` has anything to compute or return."""
        if self._control.is_frozen:
            return not self._engine.is_still
        return bool(self._pending_grammars or self._adapters) or not self._engine.is_idle

    def use_idle_time(self) -> bool:
        """Let the executor prepare one thing while there is no work. Returns False if nothing is left."""
        return self._control.has_memory and self._executor.use_idle_time()

    # ------------------------------------------------------------------ state

    def stats(self) -> EngineStats:
        engine, committed = self._engine, self._scheduler.committer
        return msgspec.structs.replace(
            engine.stats,
            num_running=len(engine.running),
            num_waiting=len(engine.waiting) + self._num_deferred,
            kv_blocks_used=engine.cache.pool.num_blocks - engine.cache.pool.num_free,
            kv_blocks_total=engine.cache.pool.num_blocks,
            num_deferred=self._num_deferred,
            num_drafts=committed.accepted_lengths.total(),
            accepted_per_position=committed.accepted_per_position,
            prompt_tokens_left=engine.prompt_tokens_left,
            sleep_state=0 if self._control.sleep_level is None else 1 + self._control.sleep_level,
            step_tokens=self._step_tokens.values,
            running_adapters=self._adapters.running,
            waiting_adapters=self._adapters.waiting,
            **self._host_stats(),
            **engine.cache.block_stats(),
        )

    @property
    def _num_deferred(self) -> int:
        engine = self._engine
        pending = len(self._pending_grammars) + len(self._adapters) + len(self._control.held)
        return engine.num_waiting_for_prefix + pending + len(engine.loading)

    def _host_stats(self) -> dict[str, Any]:
        """Return the statistics of the host memory tier."""
        tier, loads = self._engine.cache.tier, self._engine.loads
        if tier is None or loads is None:
            return {}
        return {
            "host_pages_used": tier.slots.num_blocks - tier.slots.num_plain,
            "host_pages_total": tier.slots.num_blocks,
            "host_bytes_saved": tier.num_saved * self.limits.page_bytes,
            "host_bytes_loaded": loads.num_pages * self.limits.page_bytes,
            "host_pages_dropped": tier.num_dropped,
            "num_host_loads": loads.num_loads,
            "host_load_seconds": loads.seconds,
        }

    @property
    def index_log(self) -> IndexLog:
        """The blocks that entered and left the prefix index since the last step. Call ``log_index`` first."""
        return self._engine.cache.log

    def log_index(self, on: bool = True) -> None:
        """Turn ``index_log`` on or off. It stays off without prefix caching, because then no other request
        can find a block."""
        self.index_log.is_on = on and self.limits.enable_prefix_caching

    def prefix_index(self) -> PrefixIndexState:
        """Return the present state of the prefix index."""
        is_on = self.limits.enable_prefix_caching
        return self._engine.cache.index_state(self._admission.prefix_secret if is_on else b"")

    def shutdown(self) -> None:
        self._pending_grammars.close()
        self._adapters.close()
        self._executor.shutdown()
