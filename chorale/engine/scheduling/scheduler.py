"""Scheduler: decides what the next step computes. ``schedule`` makes plans, ``commit`` takes results.

A step is planned in this order:

1. Decoding rows, one token each. If they exceed the token budget, the best keys go first.
2. Chunks of running prefills, best key first, from the rest of the budget. A decoding row that gets no block
   returns its token to the budget.
3. Admissions from the queue, best key first, until rows, budget or blocks run out. A sequence whose prefix
   is in host memory leaves the queue until it is loaded.
4. Drafts of decoding rows, from the remaining budget and blocks (``drafts/planner.py``).

The key is (priority, arrival number); priority counts only under that policy, and smaller keys run first.
Owners of equal priority take turns (``accounts``). In 1 to 3, the owner with the fewest computed tokens goes
first; rows and blocks go to the owner that holds the fewest rows. The head of the queue may preempt rows of
an owner above its share, and goes before running prefills of an owner that had more tokens.

Batch work (lines of batches) comes last under every policy. A step that computes any other prompt contains no
batch work, not even its decoding rows; otherwise batch work gets the rest of the step, as long as the step
stays short (``batch_share``). It is preempted as if its priority were worse.

Blocks. Prefills, and decoding rows whose blocks are full, get blocks in key order. A prefill first shrinks
its chunk to the free blocks. If not even one token fits, the running sequence with the worst key is
preempted, but only if its key is worse than that of the sequence that needs the block; otherwise that
sequence keeps its blocks and skips this step. So the best running sequence can always take blocks until it
runs alone, and alone it fits, because no sequence is admitted whose length could exceed
``HybridCache.capacity``. There is always progress. (With async scheduling it may have to wait for its own
step in flight, whose commit frees window blocks.)

Admission requires more blocks than it takes: for all tokens that the sequence must compute, for the rest of
running prefills, and the watermark (by default 1 % of the pool). A preempted sequence therefore returns only
when all of it fits, and displaces no other sequence then. Under "priority", the head of the queue may preempt
running sequences of a strictly worse *priority* to get blocks or a row.
"""

from __future__ import annotations

import heapq

import numpy as np

from chorale.engine.accounts import Account
from chorale.engine.engine_state import Drafter, EngineState
from chorale.engine.plan import NO_DRAFTS, PlanBuilder, ScheduledChunk, StepRecord
from chorale.engine.scheduling.batch_share import BatchShare
from chorale.engine.scheduling.commit import Committer
from chorale.engine.scheduling.pace import PromptPace
from chorale.engine.sequence import NO_TOKENS, Sequence, Status
from chorale.engine.types import EngineLimits, IntArray, StepPlan, StepResult
from chorale.engine.waiting import by_turn

BATCH_KEEPS = 8  # admissions of batch work leave 1/8 of rows and pool free, so that others start at once


class Scheduler:
    """Plans steps and commits their results.

    With async scheduling, ``schedule`` may run before the last ``commit``.
    """

    def __init__(self, engine: EngineState, limits: EngineLimits, drafter: Drafter | None = None) -> None:
        self._engine = engine
        self._limits = limits
        self._cache = engine.cache
        self._rows = engine.rows
        self._build = PlanBuilder()
        self._skipped_rows: list[int] = []  # rows
        self._most_running = limits.max_num_active_seqs or limits.max_num_seqs
        self._num_kept_rows = self._most_running // BATCH_KEEPS
        # The queue head that did not fit, and the spare blocks at that time.
        self._refused: tuple[Sequence, int] | None = None
        self.committer = Committer(engine, keep_tokens=not limits.async_scheduling)
        self._pace = PromptPace(limits)
        self._share = BatchShare(limits, self._pace)
        self._drafter = drafter

    def schedule(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed before a commit or a new request."""
        engine = self._engine
        decodes = np.flatnonzero(self._rows.decoding).astype(np.int32)
        budget = self._limits.max_num_batched_tokens
        prefills = engine.prefills
        if not (engine.num_batch or engine.waiting.num_batch):
            self._pace.begin(len(engine.running) - len(prefills), len(prefills) + len(engine.waiting))
            decodes, budget = self._schedule_some(decodes, prefills, budget, now, is_batch=False)
            return self._plan(decodes, budget)
        is_batch = self._rows.is_batch[decodes]
        others, own = decodes[~is_batch], decodes[is_batch]
        waiting = [each for each in prefills if not each.is_batch]
        self._pace.begin(
            len(engine.running) - engine.num_batch - len(waiting),
            len(waiting) + len(engine.waiting) - engine.waiting.num_batch,
        )
        others, budget = self._schedule_some(others, waiting, budget, now, is_batch=False)
        if len(engine.running) + len(engine.waiting) > engine.num_batch + engine.waiting.num_batch:
            self._share.see_others(now)
        if self._build.chunks or (self._limits.batch_waits and len(others)):
            return self._plan(others, budget)
        own = own[self._rows.decoding[own]]  # not preempted
        num_rows = self._share.begin(len(others), now)
        if len(own) > num_rows:
            own = self._best_rows(own, num_rows)
        seconds = self._share.prompt_seconds(len(others), len(own))
        if seconds is None:
            budget = self._extend_decoding(own, budget)
        else:
            self._pace.begin_batch(seconds)
            prefills = [each for each in engine.prefills if each.is_batch]
            own, budget = self._schedule_some(own, prefills, budget, now, is_batch=True)
            self._share.spend(self._pace.spent)
        return self._plan(np.sort(np.concatenate([others, own])), budget)

    def _schedule_some(
        self, decodes: IntArray, prefills: list[Sequence], budget: int, now: float, *, is_batch: bool
    ) -> tuple[IntArray, int]:
        """Schedule batch work, or all other work. Returns the rows that decode and the remaining budget."""
        if len(decodes) > budget:
            decodes = self._best_rows(decodes, budget)
        budget = self._extend_decoding(decodes, budget)
        if self._pace.is_held and not self._rows.decoding[slice(None) if is_batch else decodes].any():
            self._pace.is_held = False  # else nothing might run
        for sequence in sorted(prefills, key=by_turn):
            if self._engine.accounts.are_many:
                budget = self._admit(budget, now, is_batch=is_batch, before=sequence)
            if sequence.status is Status.PREFILL and budget > 0 and self._pace.is_open:
                budget -= self._extend_prefill(sequence, budget)
        return decodes, self._admit(budget, now, is_batch=is_batch)

    def commit(self, record: StepRecord, result: StepResult, now: float) -> None:
        """Commit the result of the oldest step in flight."""
        if len(record.plan.rows):
            self._pace.observe(record, result.seconds)
            self._share.observe(record, result.seconds)
        if result.loads_done:
            self._engine.finish_loads(result.loads_done, now)
        self.committer.commit(record, result, now)

    # ------------------------------------------------------------------ running sequences

    def _best_rows(self, decodes: IntArray, count: int) -> IntArray:
        best = sorted(decodes.tolist(), key=lambda row: by_turn(self._engine.running[row]))[:count]
        return np.array(sorted(best), np.int32)

    def _extend_decoding(self, decodes: IntArray, budget: int) -> int:
        """Give blocks to decoding rows. Returns the remaining budget."""
        rows = self._rows
        to_check = decodes[rows.computed[decodes] >= rows.next_check_at[decodes]]
        if len(to_check):
            self._extend_decodes([self._engine.running[row] for row in to_check.tolist()])
            return budget - int(np.count_nonzero(rows.decoding[decodes]))
        return budget - len(decodes)

    def _extend_decodes(self, to_check: list[Sequence]) -> None:
        for sequence in sorted(to_check, key=by_claim):
            if sequence.status is Status.DECODE:  # else a better sequence preempted it
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
        """Schedule a chunk. Returns its number of tokens, or 0 if there is no room."""
        start = int(self._rows.computed[sequence.row])
        if not self._make_room(sequence, start):
            return 0
        scored = wants_prompt_logprobs(sequence)
        wanted = self._pace.fit(start, min(budget, len(sequence.tokens_to_compute) - start), scored=scored)
        count = min(wanted, self._cache.room(sequence.blocks, start))
        self._pace.spend(start, count, scored=scored)
        self._grow(sequence, start + count)
        sequence.account.served += count / sequence.account.weight
        self._build.chunks.append(ScheduledChunk(sequence, start, count, scored))
        return count

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        first = self._cache.grow(sequence.blocks, num_tokens)
        self._build.append_blocks(sequence, first)

    def _make_room(self, sequence: Sequence, num_computed: int) -> bool:
        """Make room for one more token, preempting worse sequences. Returns False if that is impossible."""
        while self._cache.room(sequence.blocks, num_computed) < 1:
            if self._engine.release_a_load():
                continue
            worst = max(self._engine.running.values(), key=by_claim)
            if by_claim(worst) <= by_claim(sequence):
                return False
            self._preempt(worst)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._build.drop(sequence.row)
        if sequence.row in self._skipped_rows:
            self._skipped_rows.remove(sequence.row)
        self._engine.preempt(sequence)

    def preempt_all(self) -> None:
        """Take row and blocks from every running sequence; they wait to be recomputed."""
        for sequence in list(self._engine.running.values()):
            self._preempt(sequence)

    # ------------------------------------------------------------------ admissions

    def _admit(self, budget: int, now: float, *, is_batch: bool, before: Sequence | None = None) -> int:
        """Admit batch work, or all other work, from the queue. ``before``: admit only sequences that go
        before this prefill. Returns the remaining budget."""
        while budget > 0 and self._pace.is_open and (head := self._engine.waiting.head()) is not None:
            if before is not None and (head.account is before.account or by_turn(head) > by_turn(before)):
                break
            if head.is_batch is not is_batch or (is_batch and not self._has_room_for_batch()):
                break
            if not self._find_row(head):
                break
            hit = self._find_blocks(head)
            if hit is None:
                break
            if self._begins_load(head, hit, now):
                continue
            self._start(head, hit, now)
            budget -= self._extend_prefill(head, budget)
        return budget

    def _has_room_for_batch(self) -> bool:
        """Return whether one more batch sequence leaves rows for others, and may decode soon."""
        engine = self._engine
        if not engine.running:
            return True
        return engine.num_batch < self._share.num_rows and self._num_free_rows > self._num_kept_rows

    @property
    def _num_free_rows(self) -> int:
        return min(len(self._rows.free), self._most_running - len(self._engine.running))

    def _find_row(self, head: Sequence) -> bool:
        if self._num_free_rows:
            return True
        if any(record.retiring for record in self._engine.in_flight):
            return False  # the next commit releases a row
        victim = self._victim_of(head)
        if victim is not None:
            self._preempt(victim)
        return bool(self._num_free_rows)

    def _find_blocks(self, head: Sequence) -> int | None:
        """Return the length of the head's prefix hit in blocks, or None if there is no room to run it."""
        victim = self._victim_of(head)
        if self._engine.running and victim is None and self._refused is not None:
            refused, spare_then = self._refused
            if refused is head and self._spare(head) <= spare_then:
                return None
        head.tokens_to_compute = head.all_tokens()
        head.extend_block_hashes(len(head.tokens_to_compute), self._limits.block_size)
        while True:
            hit = self._hit(head)
            needed = self._cache.blocks_to_admit(head.block_hashes, hit, len(head.tokens_to_compute) + 1)
            if needed <= self._spare(head):
                return hit
            if not self._engine.running and (
                self._engine.release_a_load(head) or self._engine.release_a_load()
            ):
                continue
            victim = self._victim_of(head)
            if victim is None or needed > self._spare(head) + self._reclaimable(head):
                self._refused = (head, self._spare(head))
                return None
            self._preempt(victim)

    def _spare(self, head: Sequence | None = None) -> int:
        """Return how many free blocks the admission of ``head``, or a draft, may use."""
        free = self._cache.pool.num_free
        if self._engine.loading or self._engine.loaded:
            free -= self._engine.blocks_owed_to_loads(head)
        if not self._engine.running:
            return free
        owed = sum(
            self._cache.blocks_for(len(other.tokens_to_compute) + 1) - len(other.blocks.full)
            for other in self._engine.prefills
        )
        kept = int(self._limits.num_blocks * self._limits.watermark)
        if head is not None and head.is_batch:
            kept = max(kept, self._limits.num_blocks // BATCH_KEEPS)
        return free - owed - kept

    def _reclaimable(self, head: Sequence) -> int:
        """Return an upper bound on the blocks that preemption for the head can add to ``_spare``."""
        victims = [each for each in self._engine.running.values() if each.key[0] > head.key[0]]
        if self._engine.accounts.are_many:
            for account in {each.account for each in self._engine.running.values()} - {head.account}:
                own = self._rows_below(head, account)
                victims += heapq.nlargest(account.surplus(head.account), own, key=by_key)
        return sum(
            max(len(other.blocks.full), self._cache.blocks_for(len(other.tokens_to_compute) + 1))
            + len(other.blocks.window)
            for other in victims
        )

    def _rows_below(self, head: Sequence, account: Account) -> list[Sequence]:
        """Return the account's running sequences of the head's priority."""
        running = self._engine.running.values()
        return [each for each in running if each.account is account and each.key[0] == head.key[0]]

    def _hit(self, head: Sequence) -> int:
        """Return the blocks of the longest usable prefix.

        The last token is always computed, because its logits are needed. A request for prompt
        log-probabilities computes the whole prompt once, and so does one that skips the cache.
        """
        if not self._may_hit(head):
            return 0
        return self._cache.lookup(head.block_hashes[: self._most_hit(head)])

    def _may_hit(self, head: Sequence) -> bool:
        return not head.sampling.computes_prompt or head.request.prompt_done

    def _most_hit(self, head: Sequence) -> int:
        return (len(head.tokens_to_compute) - 1) // self._limits.block_size

    def _victim_of(self, head: Sequence) -> Sequence | None:
        """Return the worst running sequence if its priority is strictly worse than the head's, else the
        newest of the owner that is furthest above its share.

        Without the policy, all priorities are equal, except that batch work is worse.
        """
        engine = self._engine
        if engine.running and (self._limits.policy == "priority" or engine.num_batch):
            worst = max(engine.running.values(), key=by_key)
            if worst.key[0] > head.key[0]:
                return worst
        account = engine.accounts.above(head.account) if engine.accounts.are_many else None
        return None if account is None else max(self._rows_below(head, account), key=by_key, default=None)

    def _start(self, head: Sequence, hit: int, now: float) -> None:
        self._cache.attach_prefix(head.blocks, head.block_hashes, hit)
        num_cached = hit * self._limits.block_size
        load = head.load
        if not head.request.is_scheduled:
            head.request.is_scheduled = True
            head.request.num_cached_tokens = num_cached
            head.request.num_recomputed_tokens = self._num_recomputed(head, hit)
            num_loaded = 0
            if load is not None:
                num_loaded = max(0, num_cached - load.device_hit * self._limits.block_size)
            head.request.num_host_tokens = num_loaded
            if self._limits.enable_prefix_caching:
                stats = self._engine.stats
                stats.prefix_cache_queries += head.num_prompt
                stats.prefix_cache_hits += num_cached - num_loaded
                if self._engine.loads is not None:
                    stats.host_cache_queries += head.num_prompt - num_cached + num_loaded
                    stats.host_cache_hits += num_loaded
        self._build.starts.append(self._engine.start(head, num_cached, now))
        self._build.append_blocks(head, 0)

    def _num_recomputed(self, head: Sequence, hit: int) -> int:
        """Return the tokens of a cached last block that are recomputed because its last token's logits are
        needed."""
        num_blocks, rest = divmod(head.num_prompt, self._limits.block_size)
        if rest or hit != num_blocks - 1 or head.sampling.computes_prompt:
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
            return self._plan_loads()
        planned = NO_DRAFTS
        if self._drafter is not None:
            planned = self._drafter.plan(self._engine, self._grow, decodes, chunks, budget, self._spare())
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
            step_id,
            decodes,
            rows.computed[decodes],
            rows.last_token[decodes],
            wants_prompt,
            planned,
            None if self._engine.loads is None else self._engine.loads.take_transfers(),
        )
        self._pace.end(len(self._engine.waiting), has_chunks=bool(chunks))
        return self._engine.record_step(plan, len(decodes), chunks)

    def _plan_loads(self) -> StepPlan | None:
        """Return a plan without rows if there is nothing to compute but a load must start or be awaited."""
        loads = self._engine.loads
        if loads is None or not (loads.has_new or (loads.is_running and not self._engine.in_flight)):
            return None
        none = NO_TOKENS
        transfers = loads.take_transfers()
        plan = self._build.build(self._engine.next_step_id, none, none, none, [], NO_DRAFTS, transfers)
        return self._engine.record_step(plan, 0, [])

    # ------------------------------------------------------------------ loads from host memory

    def _begins_load(self, head: Sequence, hit: int, now: float) -> bool:
        """Start to load the head's prefix from host memory if that is worth it; returns whether it did. A
        load counts as an admission: a row must be free now, and enough blocks must be spare.
        """
        engine, limits = self._engine, self._limits
        if engine.loads is None or head.has_loaded or not self._may_hit(head):
            return False
        wanted = self._cache.lookup(head.block_hashes[: self._most_hit(head)], with_host=True)
        if (wanted - hit) * limits.block_size < max(1, limits.min_host_hit):
            return False
        if self._num_free_rows <= len(engine.loading) + len(engine.loaded):
            return False
        num_tokens = len(head.tokens_to_compute) + 1
        needed = self._cache.blocks_to_admit(head.block_hashes, wanted, num_tokens)
        if needed + engine.loads.blocks_to_load(head.block_hashes, wanted) > self._spare(head):
            return False
        engine.begin_load(head, wanted, hit, self._cache.new_blocks(wanted, num_tokens), now)
        return True


def by_key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key


def by_claim(sequence: Sequence) -> tuple[int, float, int]:
    """Priority, then the owner that holds the fewest rows for its weight, then arrival."""
    priority, arrival = sequence.key
    return priority, sequence.account.claim, arrival


def wants_prompt_logprobs(sequence: Sequence) -> bool:
    return sequence.sampling.prompt_logprobs is not None and not sequence.request.prompt_done
