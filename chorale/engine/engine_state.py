"""EngineState: every change of a sequence's status, and of what it holds, in one place.

    add ──► WAITING ──admit──► PREFILL ──last chunk planned──► DECODE ──► ENDED
      └───► WAITING_FOR_PREFIX ──(sibling's prompt is computed)──► WAITING      │
                                ▲────────────preempt──────────────┘        abort, fail: from anywhere to ENDED

What happens to things in flight (overlap depth 1: step n + 1 is planned before the result of n is known):

* The executor runs steps in order, so a block that is given back may be handed out by any plan made later:
  the earlier step's reads and writes are over before the later step begins. Blocks are therefore released
  at once, at an end as at a preemption. A row of a step in flight writes only positions that were not
  committed, so it never touches a block that is in the prefix index.
* A row is released when the newest step that names it was committed, so that ``RowTable.sequences`` says
  who an entry of a step in flight belongs to.
* Results in flight of an ended or preempted sequence are dropped (``StepRecord.dead_rows``). A preempted
  one has not said that token yet; it samples it again, with the same seed, after the recomputation.
"""

from __future__ import annotations

from collections import deque

from chorale.engine import emit
from chorale.engine.kv_cache.cache import HybridCache
from chorale.engine.plan import StepRecord
from chorale.engine.row_table import RowTable
from chorale.engine.sequence import RequestState, Sequence, Status
from chorale.engine.types import EngineLimits, FinishReason, RowStart, TokenChunk
from chorale.engine.waiting import WaitingQueue


class EngineState:
    """Owns requests, queue, rows and cache. Shared by admission, scheduling and commit."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.cache = HybridCache(limits.num_blocks, limits.block_size, limits.sliding_window)
        self.rows = RowTable(limits.max_num_seqs)
        self.waiting = WaitingQueue()
        self.requests: dict[str, RequestState] = {}
        self.running: dict[int, Sequence] = {}  # by row
        self.prefills: list[Sequence] = []
        self.in_flight: deque[StepRecord] = deque()
        self.next_step_id = 0
        self.last_committed_step = -1
        self.outbox: list[TokenChunk] = []
        self.num_waiting_for_prefix = 0
        self.num_preemptions = 0

    def enter(self, state: RequestState) -> None:
        """A request was accepted: its first choice waits, the others are held back if they can share."""
        self.requests[state.request.request_id] = state
        state.num_unfinished = len(state.sequences)
        first, *others = state.sequences
        self.waiting.push(first)
        for sequence in others:
            sequence.status = Status.WAITING_FOR_PREFIX
        self.num_waiting_for_prefix += len(others)

    def queue_siblings(self, state: RequestState) -> None:
        """The leader has computed the prompt: its siblings may come and share it."""
        for sequence in state.sequences:
            if sequence.status is Status.WAITING_FOR_PREFIX:
                self.num_waiting_for_prefix -= 1
                self.waiting.push(sequence)

    def start(self, sequence: Sequence, num_cached: int, now: float) -> RowStart:
        """The head of the queue takes a row; its blocks up to ``num_cached`` tokens were adopted."""
        self.waiting.pop()
        sequence.row = row = self.rows.take(sequence, num_cached)
        sequence.status = Status.PREFILL
        self.running[row] = sequence
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
        )

    def begin_decode(self, sequence: Sequence) -> None:
        """Its last known token has been planned; from now on it is one of the decoding rows."""
        sequence.status = Status.DECODE
        self.prefills.remove(sequence)
        self.rows.decoding[sequence.row] = True
        self.set_next_check(sequence)

    def set_next_check(self, sequence: Sequence) -> None:
        """The next look is needed when its blocks are full, or its last token has been planned."""
        held = len(sequence.blocks.full) * self.limits.block_size
        self.rows.next_check_at[sequence.row] = min(held, sequence.max_len - 1)

    def preempt(self, sequence: Sequence) -> None:
        """Take away row and blocks; the sequence waits to be computed again."""
        self._leave_row(sequence)
        state = sequence.request
        if sequence.is_leader and not state.prompt_done:
            state.prompt_logprobs = None
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(sequence)

    def end(self, sequence: Sequence, chunk: TokenChunk) -> None:
        """The one way to the end: says ``chunk``, gives back everything."""
        if sequence.is_running:
            self._leave_row(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.forget(sequence)
        elif sequence.status is Status.WAITING_FOR_PREFIX:
            self.num_waiting_for_prefix -= 1
        sequence.status = Status.ENDED
        self.outbox.append(chunk)
        state = sequence.request
        state.num_unfinished -= 1
        if state.num_unfinished == 0:
            del self.requests[sequence.request_id]

    def abort_choice(self, sequence: Sequence, now: float) -> None:
        """End one choice of a request, unless it has ended; the others go on."""
        state = sequence.request
        if sequence.status is Status.ENDED:
            return
        self.end(sequence, emit.end_chunk(sequence, "abort", now))
        if sequence.is_leader and not state.prompt_done:
            self._next_leader(state)

    def _next_leader(self, state: RequestState) -> None:
        """The prompt is not computed and its leader has left: a sibling that was held takes over."""
        state.prompt_logprobs = None
        for sequence in state.sequences:
            if sequence.status is Status.WAITING_FOR_PREFIX:
                state.leader = sequence.index
                self.num_waiting_for_prefix -= 1
                self.waiting.push(sequence)
                return

    def end_request(self, state: RequestState, finish: FinishReason, now: float, error: str | None) -> None:
        """End whatever of a request has not ended."""
        for sequence in state.sequences:
            if sequence.status is not Status.ENDED:
                self.end(sequence, emit.end_chunk(sequence, finish, now, error))

    def fail(self, error: str, now: float) -> None:
        """The device cannot be trusted any more: end everything, forget every block and step."""
        self.in_flight.clear()
        self.last_committed_step = self.next_step_id - 1  # nothing is in flight any more
        for state in list(self.requests.values()):
            self.end_request(state, "error", now, error)
        for row, sequence in enumerate(self.rows.sequences):
            if sequence is not None:  # was retiring when the step failed
                self.rows.release(row)
        self.cache.pool.forget_all()

    def committed(self, record: StepRecord) -> None:
        """``record`` left the device: rows that waited for it are free."""
        for row in record.retiring:
            self.rows.release(row)

    def _leave_row(self, sequence: Sequence) -> None:
        row = sequence.row
        self.cache.release(sequence.blocks)
        if sequence.status is Status.PREFILL:
            self.prefills.remove(sequence)
        self.rows.decoding[row] = False
        del self.running[row]
        sequence.row = -1
        last_step = int(self.rows.last_step[row])
        if last_step <= self.last_committed_step:
            self.rows.release(row)
            return
        for record in self.in_flight:
            record.dead_rows.add(row)
            if record.plan.step_id == last_step:
                record.retiring.append(row)
