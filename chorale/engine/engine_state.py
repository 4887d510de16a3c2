"""EngineState: all changes of a sequence's status and of its row and blocks, in one place.

    add ──► WAITING ──admit──► PREFILL ──last chunk planned──► DECODE ──► ENDED
      └───► WAITING_FOR_PREFIX ──(sibling's prompt is computed)──► WAITING      │
                                ▲────────────preempt──────────────┘        abort, fail: from anywhere to ENDED
    WAITING ──begin_load──► LOADING ──(its prefix is back from host memory)──► WAITING

With async scheduling, step n + 1 is planned before the result of step n is known. For steps in flight:

* The executor runs steps in order, so a released block may be handed out by any later plan: the earlier
  step's reads and writes are over before the later step begins. Blocks are therefore released as soon as a
  sequence ends or is preempted. A row of a step in flight writes only positions that are not committed yet,
  so it never touches a block that is in the prefix index.
* A row is released when the newest step that names it is committed, so that ``RowTable.sequences`` maps the
  entries of steps in flight to their sequences.
* Results in flight of an ended or preempted sequence are dropped (``StepRecord.dead_rows``). A preempted
  sequence has not emitted that token yet; it samples it again, with the same seed, once it is recomputed.
* The number of computed tokens depends on how much of a draft is accepted. A row with a draft in flight is in
  no other plan until that step is committed, unless the next draft is made on the device: then plans assume
  that all of it is accepted (``RowTable.is_uncertain``), and the device corrects them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from chorale.engine import emit
from chorale.engine.accounts import Accounts
from chorale.engine.adapters.queue import AdapterQueue
from chorale.engine.commands import FIRST_VERSION
from chorale.engine.kv_cache.cache import HybridCache
from chorale.engine.kv_cache.expert_pages import ExpertPages
from chorale.engine.kv_cache.host_loads import HostLoads
from chorale.engine.plan import PlannedDrafts, ScheduledChunk, StepRecord
from chorale.engine.row_table import RowTable
from chorale.engine.sequence import NO_TOKENS, RequestState, Sequence, Status
from chorale.engine.types import (
    EngineLimits,
    EngineStats,
    FinishReason,
    IntArray,
    RowStart,
    StepPlan,
    TokenChunk,
)
from chorale.engine.waiting import WaitingQueue

# Gives a sequence blocks for a number of tokens, and adds the blocks to the plan.
Grow = Callable[[Sequence, int], None]


class Drafter:
    """Guesses next tokens. Drafts change how fast a sequence advances, never its tokens."""

    def plan(
        self,
        engine: EngineState,
        grow: Grow,
        decodes: IntArray,
        chunks: list[ScheduledChunk],
        budget: int,
        num_spare: int,
    ) -> PlannedDrafts:
        """Decide which rows of a step verify drafts, and which get new drafts. ``budget``: tokens;
        ``num_spare``: blocks."""
        raise NotImplementedError

    def drafts_on_device(self, sequence: Sequence) -> bool:
        """Returns whether the sequence's drafts stay on the device, so that plans need not know them."""
        return False

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence. Its output is complete."""


class EngineState:
    """Requests, queue, rows, cache and steps in flight. Other modules read the attributes and call the
    methods; only the methods change the state."""

    def __init__(
        self, limits: EngineLimits, drafter: Drafter | None = None, adapters: AdapterQueue | None = None
    ) -> None:
        self.limits = limits
        self.adapters = AdapterQueue(None, 0) if adapters is None else adapters
        self.drafter = drafter
        self.cache = HybridCache(
            limits.num_blocks,
            limits.block_size,
            limits.sliding_window,
            limits.num_host_slots,
            limits.max_saved_pages,
            limits.observed_blocks,
        )
        sizes = limits.num_blocks, limits.block_size, limits.num_host_slots
        self.experts = ExpertPages(*sizes, limits.routed_experts) if limits.routed_experts else None
        self.loads = None if self.cache.tier is None else HostLoads(self.cache, self.cache.tier)
        # Keyed by load id: loads that run, and loads that have ended but whose sequence is not admitted yet.
        self.loading: dict[int, Sequence] = {}
        self.loaded: dict[int, Sequence] = {}
        self.rows = RowTable(limits.max_num_seqs)
        self.waiting = WaitingQueue()
        self.accounts = Accounts()
        self.requests: dict[str, RequestState] = {}
        self.running: dict[int, Sequence] = {}  # by row
        self.prefills: list[Sequence] = []
        self.in_flight: deque[StepRecord] = deque()  # oldest first
        self.next_step_id = 0
        self.num_waiting_for_prefix = 0
        self.num_batch = 0  # sequences of batch work in ``running``
        self.stats = EngineStats()  # the counters; ``EngineCore.stats`` adds the rest
        self.served_version = FIRST_VERSION  # label of the weights
        self._last_committed_step = -1
        self._outbox: list[TokenChunk] = []
        # Queues a chunk for ``take_chunks``. Bound once, because every row of every step calls it.
        self.emit = self._outbox.append

    # ------------------------------------------------------------------ requests

    def add_request(self, state: RequestState) -> None:
        """Queue the first choice of an accepted request; the others wait to share its prompt."""
        self.requests[state.request.request_id] = state
        state.num_unfinished = len(state.sequences)
        account = self.accounts.open(state.request.owner, is_batch=state.request.is_batch)
        for sequence in state.sequences:
            sequence.account = account
        first, *others = state.sequences
        self.waiting.push(first)
        for sequence in others:
            sequence.status = Status.WAITING_FOR_PREFIX
        self.num_waiting_for_prefix += len(others)

    def queue_siblings(self, state: RequestState) -> None:
        """Queue the choices that were waiting to share the prompt, which the leader has now computed."""
        for sequence in state.sequences:
            if sequence.status is Status.WAITING_FOR_PREFIX:
                self.num_waiting_for_prefix -= 1
                self.waiting.push(sequence)

    def take_chunks(self) -> list[TokenChunk]:
        """Return the chunks emitted since the last call."""
        chunks = self._outbox.copy()
        self._outbox.clear()
        return chunks

    @property
    def is_idle(self) -> bool:
        """Returns whether no request, step or chunk is left."""
        if self.loads is not None and self.loads.is_running:
            return False  # its sequence was aborted; it still holds blocks
        return not (self.requests or self.in_flight or self._outbox)

    @property
    def is_still(self) -> bool:
        """Returns whether no step or chunk is left; requests may be."""
        return not (self.in_flight or self._outbox)

    @property
    def prompt_tokens_left(self) -> int:
        """Estimate of the tokens that prefills and waiting sequences must still compute."""
        computed = self.rows.computed
        left = sum(len(each.tokens_to_compute) - int(computed[each.row]) for each in self.prefills)
        return left + self.waiting.num_tokens

    # ------------------------------------------------------------------ sequences

    def start(self, sequence: Sequence, num_cached: int, now: float) -> RowStart:
        """Give a row to the head of the queue. The blocks of its first ``num_cached`` tokens are attached
        already."""
        self.waiting.remove_head(sequence)
        self._release_load(sequence)  # its blocks are attached
        on_device = self.drafter is not None and self.drafter.drafts_on_device(sequence)
        sequence.row = row = self.rows.take(sequence, num_cached, drafts_on_device=on_device)
        sequence.status = Status.PREFILL
        self.running[row] = sequence
        self.num_batch += sequence.is_batch
        sequence.account.num_rows += 1
        self.prefills.append(sequence)
        if not sequence.first_scheduled:
            sequence.first_scheduled = now
        return RowStart(
            row=row,
            token_ids=sequence.tokens_to_compute,
            num_prompt_tokens=sequence.num_prompt,
            sampling=sequence.sampling,
            seed=sequence.seed,
            eos_token_ids=tuple(sorted(sequence.stop_ids)),
            adapter_slot=self.adapters.slot_of(sequence.request.request.adapter),
        )

    def set_weight_version(self, version: str = FIRST_VERSION) -> None:
        """Label the tokens from the next step on."""
        self.served_version = version
        self.rows.needs_slow_path[:] = True  # the next token of each row gets the label

    def schedule_next_check(self, sequence: Sequence) -> None:
        """Let the scheduler skip a decoding row until its blocks are full or its last token is planned."""
        num_slots = len(sequence.blocks.full) * self.limits.block_size
        self.rows.set_next_check(sequence.row, min(num_slots, sequence.max_len - 1))

    def preempt(self, sequence: Sequence) -> None:
        """Take away row and blocks; the sequence waits to be recomputed."""
        self._leave_row(sequence)
        state = sequence.request
        if sequence.is_leader and not state.prompt_done:
            state.prompt_logprobs = None
        sequence.num_preemptions += 1
        sequence.has_loaded = False
        self.stats.num_preemptions += 1
        self.waiting.push(sequence)

    def end(self, sequence: Sequence, chunk: TokenChunk) -> None:
        """End a sequence: emit its last chunk and release everything it holds."""
        if sequence.is_running:
            self._leave_row(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.forget(sequence)
        elif sequence.status is Status.WAITING_FOR_PREFIX:
            self.num_waiting_for_prefix -= 1
        elif sequence.load is not None:  # LOADING
            del self.loading[sequence.load.load_id]
        self._release_load(sequence)
        sequence.status = Status.ENDED
        if self.drafter is not None:
            self.drafter.end(sequence)
        self.emit(chunk)
        state = sequence.request
        state.num_unfinished -= 1
        if state.num_unfinished == 0:
            del self.requests[sequence.request_id]
            self.adapters.release(state.request.adapter)
            self.accounts.close(sequence.account)

    def abort_choice(self, sequence: Sequence, now: float) -> None:
        """End one choice of a request unless it has ended; the others continue."""
        state = sequence.request
        if sequence.status is Status.ENDED:
            return
        self.end(sequence, emit.end_chunk(sequence, "abort", now))
        if sequence.is_leader and not state.prompt_done:
            self._choose_next_leader(state)

    def _choose_next_leader(self, state: RequestState) -> None:
        """Make a waiting sibling the leader if the leader ended before it had computed the prompt."""
        state.prompt_logprobs = None
        for sequence in state.sequences:
            if sequence.status is Status.WAITING_FOR_PREFIX:
                state.leader = sequence.index
                self.num_waiting_for_prefix -= 1
                self.waiting.push(sequence)
                return

    def end_request(self, state: RequestState, finish: FinishReason, now: float, error: str | None) -> None:
        """End every choice of a request that has not ended."""
        for sequence in state.sequences:
            if sequence.status is not Status.ENDED:
                self.end(sequence, emit.end_chunk(sequence, finish, now, error))

    def _leave_row(self, sequence: Sequence) -> None:
        row = sequence.row
        sequence.drafts = NO_TOKENS
        self.cache.keep_resumable(sequence.blocks, sequence.block_hashes)
        self.cache.release(sequence.blocks)
        if sequence.status is Status.PREFILL:
            self.prefills.remove(sequence)
        self.rows.set_decoding(row, False)
        del self.running[row]
        self.num_batch -= sequence.is_batch
        sequence.account.num_rows -= 1
        sequence.row = -1
        last_step = int(self.rows.last_step[row])
        if last_step <= self._last_committed_step:
            self.rows.release(row)
            return
        for record in self.in_flight:
            record.dead_rows.add(row)
            if record.plan.step_id == last_step:
                record.retiring.append(row)

    # ------------------------------------------------------------------ loads from host memory

    def begin_load(self, sequence: Sequence, hit: int, device_hit: int, num_owed: int, now: float) -> None:
        """Load the prefix blocks that the device lacks. The sequence, the queue's head, leaves the queue
        meanwhile."""
        assert self.loads is not None
        self.waiting.remove_head(sequence)
        sequence.status = Status.LOADING
        sequence.has_loaded = True
        sequence.load = self.loads.begin(sequence.block_hashes, hit, device_hit, num_owed, now, sequence)
        self.loading[sequence.load.load_id] = sequence

    def finish_loads(self, load_ids: Iterable[int], now: float) -> None:
        """Put the sequences whose loads have ended back into the queue, at their former positions."""
        assert self.loads is not None
        for load_id in load_ids:
            self.loads.finish(load_id, now)
            sequence = self.loading.pop(load_id, None)
            if sequence is not None:
                self.loaded[load_id] = sequence
                self.waiting.push(sequence)

    def release_a_load(self, head: Sequence | None = None) -> bool:
        """Release the blocks that a load holds for the waiting sequence with the worst key, other than
        ``head``. Returns False if there is none."""
        holders = [each for each in self.loaded.values() if each is not head]
        if not holders:
            return False
        self._release_load(max(holders, key=lambda each: each.key))
        return True

    def blocks_owed_to_loads(self, head: Sequence | None) -> int:
        """Return how many free blocks the sequences other than ``head`` will need once they are loaded."""
        return sum(
            each.load.num_owed
            for some in (self.loading, self.loaded)
            for each in some.values()
            if each.load is not None and each is not head
        )

    def _release_load(self, sequence: Sequence) -> None:
        if sequence.load is not None and self.loads is not None:
            self.loaded.pop(sequence.load.load_id, None)
            self.loads.release(sequence.load)
            sequence.load = None

    def invalidate(self, block_hashes: list[bytes]) -> None:
        """Prevent other requests from using these blocks, on the device and in host memory."""
        self.cache.invalidate(block_hashes)
        if self.loads is not None:
            self.loads.invalidate(block_hashes)

    # ------------------------------------------------------------------ steps

    def record_step(self, plan: StepPlan, num_decodes: int, chunks: list[ScheduledChunk]) -> StepPlan:
        """Put a plan in flight. Sequences whose last chunk it contains decode in the next step."""
        self.rows.record_step(plan.step_id, plan.rows, plan.num_new)
        if self.experts is not None and plan.transfers is not None:
            self.experts.move(plan.transfers)
        if self.accounts.are_many:
            self.accounts.charge_rows()
        if plan.makes is not None:
            self.rows.record_drafts(plan.rows, np.where(plan.makes, np.int32(plan.num_made), np.int32(0)))
        else:  # earlier drafts no longer continue these rows
            self.rows.record_drafts(plan.rows, np.int32(0))
        if plan.num_drafts is not None:
            drafted = plan.rows[plan.num_drafts > 0]
            on_device = self.rows.drafts_on_device[drafted]
            self.rows.doubt(drafted[on_device])
            for row in drafted[~on_device].tolist():
                self.rows.set_decoding(row, False)
        for chunk in chunks:
            if chunk.is_last:
                self._begin_decode(chunk.sequence)
        num_batch = 0
        if self.num_batch:
            num_batch = int(np.count_nonzero(self.rows.is_batch[plan.rows[:num_decodes]]))
        self.in_flight.append(StepRecord(plan, num_decodes, chunks, num_batch=num_batch))
        self.next_step_id += 1
        return plan

    def _begin_decode(self, sequence: Sequence) -> None:
        sequence.status = Status.DECODE
        self.prefills.remove(sequence)
        self.rows.set_decoding(sequence.row, True)
        self.schedule_next_check(sequence)

    def resume_decode(self, sequence: Sequence, num_kept: int, num_rejected: int) -> None:
        """Continue a sequence whose draft is verified: keep ``num_kept`` of the tokens that its plan
        computed, drop ``num_rejected`` and the blocks that only they needed."""
        row, computed, block_size = sequence.row, sequence.num_tokens - 1, self.limits.block_size
        self.rows.take_back(row, num_rejected)
        if computed // block_size > (computed - num_kept) // block_size:
            self.commit_blocks(sequence, computed)
        # A later step in flight computes up to ``rows.computed``, and the head to the end of its drafts.
        self.cache.shrink(sequence.blocks, int(self.rows.computed[row] + 1 + self.rows.drafted[row]))
        self.rows.set_decoding(row, True)
        self.schedule_next_check(sequence)

    def commit_blocks(self, sequence: Sequence, num_computed: int) -> None:
        """Publish the blocks that ``num_computed`` tokens fill, and release blocks that no query sees."""
        sequence.extend_block_hashes(num_computed, self.limits.block_size)
        self.cache.commit(sequence.blocks, num_computed, sequence.block_hashes, sequence)

    def is_in_flight(self, row: int) -> bool:
        """Returns whether a step that names the row is not committed yet."""
        return int(self.rows.last_step[row]) > self._last_committed_step

    def begin_commit(self) -> None:
        """Remove the oldest step in flight and return it; its result is about to be committed."""
        plan = self.in_flight.popleft().plan
        self._last_committed_step = plan.step_id
        if plan.num_drafts is not None:
            self.rows.settle(plan.step_id, plan.rows)

    def finish_commit(self, record: StepRecord) -> None:
        """Release the rows that were kept until this step ended."""
        for row in record.retiring:
            self.rows.release(row)

    def fail(self, error: str, now: float) -> None:
        """End every request and forget every block and step, because the device's memory is unreliable."""
        self.in_flight.clear()
        self._last_committed_step = self.next_step_id - 1  # nothing is in flight any more
        for state in list(self.requests.values()):
            self.end_request(state, "error", now, error)
        for row, sequence in enumerate(self.rows.sequences):
            if sequence is not None:  # was retiring when the step failed
                self.rows.release(row)
        if self.loads is not None:
            self.loads.fail()
        self.cache.forget_all()
