"""Scheduler: decides what the next step computes. ``schedule`` makes plans, ``commit`` takes results.

A step is planned in this order:

1. Decoding rows, one token each. If they exceed the token budget, the best keys go first.
2. Chunks of running prefills, best key first, from what is left of the budget. A decoding row that gets no
   block returns its token to the budget.
3. Admissions from the queue, best key first, until rows, budget or blocks run out.
4. Drafts of decoding rows, from what is still left of budget and blocks (``drafts/planner.py``).

The key is (priority, arrival number); priority counts only under that policy, and smaller keys run first.

Blocks. Prefills, and decoding rows whose blocks are full, get blocks in key order. A prefill first shrinks
its chunk to what is free. If not even one token fits, the running sequence with the worst key is preempted,
but only if its key is worse than that of the sequence that needs the block; otherwise that sequence keeps
what it has and skips this step. So the best running sequence can always take blocks until it runs alone, and
alone it fits, because no sequence is admitted whose length could exceed ``HybridCache.capacity``: there is
always progress. (With async scheduling it may have to wait for its own step in flight, whose commit frees
window blocks.)

Admission requires more than it takes: blocks for all tokens the sequence must compute, for what running
prefills still need, and 1 % of the pool. A preempted sequence therefore returns only when all of it fits, and
does not displace others when it does. Under "priority", the head of the queue may preempt running sequences
of a strictly worse *priority* to get blocks or a row.
"""

from __future__ import annotations

import numpy as np

from chorale.engine.commit import Committer
from chorale.engine.drafts.planned import NO_DRAFTS
from chorale.engine.drafts.planners import make_planner
from chorale.engine.engine_state import EngineState
from chorale.engine.pace import PromptPace
from chorale.engine.plan import PlanBuilder, ScheduledChunk, StepRecord
from chorale.engine.sequence import Sequence, Status
from chorale.engine.types import EngineLimits, IntArray, StepPlan, StepResult

WATERMARK = 100  # admissions leave 1/100 of the pool free while anything runs


class Scheduler:
    """Plans steps and commits their results.

    With async scheduling, ``schedule`` may run before the last ``commit``.
    """

    def __init__(self, engine: EngineState, limits: EngineLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._cache = engine.cache
        self._rows = engine.rows
        self._build = PlanBuilder()
        self._skipped_rows: list[int] = []  # rows
        self._refused: tuple[Sequence, int] | None = None  # head of the queue, spare blocks at that time
        self.committer = Committer(engine, keep_tokens=not limits.async_scheduling)
        self._pace = PromptPace(limits)
        self._drafts = make_planner(engine, self._grow)
        self.prefix_queries = 0
        self.prefix_hits = 0

    def schedule(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed before a commit or a new request."""
        decodes = np.flatnonzero(self._rows.decoding).astype(np.int32)
        budget = self._limits.max_num_batched_tokens
        num_prompts = len(self._engine.prefills) + len(self._engine.waiting)
        self._pace.begin(len(self._engine.running) - len(self._engine.prefills), num_prompts)
        if len(decodes) > budget:
            decodes = self._best_rows(decodes, budget)
        budget = self._extend_running(decodes, budget)
        budget = self._admit(budget, now)
        return self._plan(decodes, budget)

    def commit(self, record: StepRecord, result: StepResult, now: float) -> None:
        """Commit the result of the oldest step in flight."""
        self._pace.observe(record, result.seconds)
        if self._engine.lengths is not None:
            self._engine.lengths.observe(record, result, now)
        self.committer.commit(record, result, now)

    # ------------------------------------------------------------------ running sequences

    def _best_rows(self, decodes: IntArray, count: int) -> IntArray:
        best = sorted(decodes.tolist(), key=lambda row: self._engine.running[row].key)[:count]
        return np.array(sorted(best), np.int32)

    def _extend_running(self, decodes: IntArray, budget: int) -> int:
        """Give blocks to decodes and chunks to prefills. Returns the budget that is left."""
        rows = self._rows
        to_check = decodes[rows.computed[decodes] >= rows.next_check_at[decodes]]
        if len(to_check):
            self._extend_decodes([self._engine.running[row] for row in to_check.tolist()])
            budget -= int(np.count_nonzero(rows.decoding[decodes]))
        else:
            budget -= len(decodes)
        for sequence in sorted(self._engine.prefills, key=by_key):
            if sequence.status is Status.PREFILL and budget > 0 and self._pace.is_open:
                budget -= self._extend_prefill(sequence, budget)
        return budget

    def _extend_decodes(self, to_check: list[Sequence]) -> None:
        for sequence in sorted(to_check, key=by_key):
            if sequence.status is Status.DECODE:  # else a better one preempted it
                self._extend_decode(sequence)

    def _extend_decode(self, sequence: Sequence) -> None:
        row = sequence.row
        computed = int(self._rows.computed[row])
        if computed >= sequence.max_len - 1:
            self._rows.set_decoding(row, False)  # its last token is in flight: it ends at that commit
        elif self._make_room(sequence, computed):
            self._grow(sequence, computed + 1)
            self._engine.schedule_next_check(sequence)
        else:
            self._rows.set_decoding(row, False)
            self._skipped_rows.append(row)

    def _extend_prefill(self, sequence: Sequence, budget: int) -> int:
        """Schedule a chunk. Returns its number of tokens, 0 if there is no room."""
        start = int(self._rows.computed[sequence.row])
        if not self._make_room(sequence, start):
            return 0
        scored = wants_prompt_logprobs(sequence)
        wanted = self._pace.fit(start, min(budget, len(sequence.tokens_to_compute) - start), scored=scored)
        count = min(wanted, self._cache.room(sequence.blocks, start))
        self._pace.spend(start, count, scored=scored)
        self._grow(sequence, start + count)
        self._build.chunks.append(ScheduledChunk(sequence, start, count, scored))
        return count

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        first = self._cache.grow(sequence.blocks, num_tokens)
        self._build.append_blocks(sequence, first)

    def _make_room(self, sequence: Sequence, num_computed: int) -> bool:
        """Make room for one more token, preempting worse sequences. Returns False if that is impossible."""
        while self._cache.room(sequence.blocks, num_computed) < 1:
            worst = max(self._engine.running.values(), key=by_key)
            if worst.key <= sequence.key:
                return False
            self._preempt(worst)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._build.drop(sequence.row)
        if sequence.row in self._skipped_rows:
            self._skipped_rows.remove(sequence.row)
        self._engine.preempt(sequence)

    # ------------------------------------------------------------------ admissions

    def _admit(self, budget: int, now: float) -> int:
        """Admit from the queue. Returns the budget that is left."""
        while budget > 0 and self._pace.is_open and (head := self._engine.waiting.head()) is not None:
            if not self._find_row(head):
                break
            hit = self._find_blocks(head)
            if hit is None:
                break
            self._start(head, hit, now)
            budget -= self._extend_prefill(head, budget)
        return budget

    def _find_row(self, head: Sequence) -> bool:
        if self._rows.free:
            return True
        if any(record.retiring for record in self._engine.in_flight):
            return False  # the next commit releases one
        victim = self._victim_of(head)
        if victim is not None:
            self._preempt(victim)
        return bool(self._rows.free)

    def _find_blocks(self, head: Sequence) -> int | None:
        """Return the length of the head's prefix hit in blocks, or None if there is no room to run it."""
        victim = self._victim_of(head)
        if self._engine.running and victim is None and self._refused is not None:
            refused, spare_then = self._refused
            if refused is head and self._spare() <= spare_then:
                return None
        head.tokens_to_compute = head.all_tokens()
        head.extend_block_hashes(len(head.tokens_to_compute), self._limits.block_size)
        while True:
            hit = self._hit(head)
            needed = self._cache.blocks_to_admit(head.block_hashes, hit, len(head.tokens_to_compute) + 1)
            if needed <= self._spare():
                return hit
            victim = self._victim_of(head)
            if victim is None or needed > self._spare() + self._reclaimable(head):
                self._refused = (head, self._spare())
                return None
            self._preempt(victim)

    def _spare(self) -> int:
        """Number of free blocks that an admission may count on."""
        free = self._cache.pool.num_free
        if not self._engine.running:
            return free
        owed = sum(
            self._cache.blocks_for(len(other.tokens_to_compute) + 1) - len(other.blocks.full)
            for other in self._engine.prefills
        )
        return free - owed - self._limits.num_blocks // WATERMARK

    def _reclaimable(self, head: Sequence) -> int:
        """Upper bound on the blocks that preempting every sequence of a worse priority would add to
        ``_spare``."""
        return sum(
            max(len(other.blocks.full), self._cache.blocks_for(len(other.tokens_to_compute) + 1))
            + len(other.blocks.window)
            for other in self._engine.running.values()
            if other.key[0] > head.key[0]
        )

    def _hit(self, head: Sequence) -> int:
        """Return the blocks of the longest usable prefix.

        The last token is always computed, because its logits are needed. A request for prompt
        log-probabilities computes the whole prompt once.
        """
        if head.sampling.prompt_logprobs is not None and not head.request.prompt_done:
            return 0
        return self._cache.lookup(
            head.block_hashes[: (len(head.tokens_to_compute) - 1) // self._limits.block_size]
        )

    def _victim_of(self, head: Sequence) -> Sequence | None:
        """Return the worst running sequence if its priority is strictly worse than the head's."""
        if self._limits.policy != "priority" or not self._engine.running:
            return None
        worst = max(self._engine.running.values(), key=by_key)
        return worst if worst.key[0] > head.key[0] else None

    def _start(self, head: Sequence, hit: int, now: float) -> None:
        self._cache.attach_prefix(head.blocks, head.block_hashes, hit)
        num_cached = hit * self._limits.block_size
        if not head.request.is_scheduled:
            head.request.is_scheduled = True
            head.request.num_cached_tokens = num_cached
            head.request.num_recomputed_tokens = self._num_recomputed(head, hit)
            if self._limits.enable_prefix_caching:
                self.prefix_queries += head.num_prompt
                self.prefix_hits += num_cached
        self._build.starts.append(self._engine.start(head, num_cached, now))
        self._build.append_blocks(head, 0)

    def _num_recomputed(self, head: Sequence, hit: int) -> int:
        """Tokens of a fully cached last block that are recomputed because its last token's logits are
        needed."""
        num_blocks, rest = divmod(head.num_prompt, self._limits.block_size)
        if rest or hit != num_blocks - 1 or head.sampling.prompt_logprobs is not None:
            return 0
        cached = self._cache.lookup(head.block_hashes[:num_blocks]) == num_blocks
        return self._limits.block_size if cached else 0

    # ------------------------------------------------------------------ the plan

    def _plan(self, decodes: IntArray, budget: int) -> StepPlan | None:
        rows = self._rows
        decodes = decodes[rows.decoding[decodes]]
        for row in self._skipped_rows:
            rows.set_decoding(row, True)
        self._skipped_rows.clear()
        chunks = self._build.chunks
        if not len(decodes) and not chunks:
            return None
        planned = self._drafts.plan(decodes, chunks, budget, self._spare()) if self._drafts else NO_DRAFTS
        if planned.waiting:
            decodes = decodes[~np.isin(decodes, planned.waiting)]
            if not len(decodes) and not chunks:
                return None
        if planned.tokens:
            has_draft = np.isin(decodes, list(planned.tokens))
            decodes = np.concatenate([decodes[~has_draft], decodes[has_draft]])
        wants_prompt = [chunk.sequence.row for chunk in chunks if chunk.scored]
        step_id = self._engine.next_step_id
        plan = self._build.build(
            step_id, decodes, rows.computed[decodes], rows.last_token[decodes], wants_prompt, planned
        )
        return self._engine.record_step(plan, len(decodes), chunks)


def by_key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key


def wants_prompt_logprobs(sequence: Sequence) -> bool:
    return sequence.sampling.prompt_logprobs is not None and not sequence.request.prompt_done
