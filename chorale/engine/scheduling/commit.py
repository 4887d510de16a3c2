"""Committer: turns a step's result into new tokens, ended sequences and TokenChunks.

The common entry, a decoding row whose token neither stops it nor needs log-probabilities, costs an append and
a chunk. All other cases are marked ``needs_slow_path`` or found by comparing arrays.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np

from chorale.engine import emit
from chorale.engine.engine_state import EngineState
from chorale.engine.kv_cache.expert_pages import ExpertPages
from chorale.engine.plan import ScheduledChunk, StepRecord
from chorale.engine.sequence import Sequence
from chorale.engine.types import BoolArray, FinishReason, IntArray, StepPlan, StepResult, TokenChunk
from chorale.errors import EngineError


class Committer:
    """Commits steps in order. ``keep_tokens``: plans contain the sampled tokens; otherwise they refer to the
    copy on the device."""

    def __init__(self, engine: EngineState, *, keep_tokens: bool) -> None:
        self._engine, self._stats = engine, engine.stats
        self._keep_tokens = keep_tokens
        self.accepted_lengths = Counter[int]()  # accepted tokens -> drafts

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """How many drafts had at least 1, 2, ... accepted tokens."""
        lengths = self.accepted_lengths
        counts = [lengths[length] for length in range(max(lengths, default=0), 0, -1)]
        return tuple(itertools.accumulate(counts))[::-1]

    def commit(self, record: StepRecord, result: StepResult, now: float) -> None:
        """``record`` is the oldest step in flight and ``result`` is its result."""
        engine, plan = self._engine, record.plan
        if result.step_id != plan.step_id or len(result.token_ids) != len(plan.rows):
            raise EngineError(f"result of step {result.step_id} came for step {plan.step_id}")
        engine.begin_commit()
        if engine.experts is not None:
            self._store_experts(record, result, engine.experts)
        ends = plan.num_computed + plan.num_new
        self._commit_decoded_blocks(record, ends)
        for entry, chunk in enumerate(record.chunks, record.num_decodes):
            self._commit_chunk(record, entry, chunk, result)
        self._commit_tokens(record, result, ends, now)
        engine.finish_commit(record)

    def _store_experts(self, record: StepRecord, result: StepResult, pages: ExpertPages) -> None:
        """Store the experts of the step's tokens. Positions of rejected draft tokens are left out."""
        plan, slots, kept = record.plan, list[int](), list[int]()  # ``kept``: places in the result
        firsts = np.cumsum(plan.num_new) - plan.num_new
        counts = plan.num_new.copy()
        counts[: record.num_decodes] = result.num_sampled[: record.num_decodes]
        columns = (plan.rows.tolist(), firsts.tolist(), counts.tolist())
        for entry, (row, first, count) in enumerate(zip(*columns, strict=True)):
            if row not in record.dead_rows:
                sequence, chunk = self._engine.running[row], entry - record.num_decodes
                start = sequence.num_tokens - 1 if chunk < 0 else record.chunks[chunk].start
                slots += pages.slots(sequence.blocks.full, start, count)
                kept += range(first, first + count)
        if result.experts is not None:  # else the step had no rows
            pages.write(slots, result.experts[kept])

    def _add_experts(self, sequence: Sequence, chunk: TokenChunk, num_taken: int) -> None:
        """Add the experts of the positions that gave the newest tokens, and to the first one the prompt's."""
        pages, start = self._engine.experts, sequence.sampling.routed_experts_start
        if pages is None or start is None:
            return
        stop = sequence.num_tokens - 1
        if len(sequence.output) > num_taken:
            start = stop - num_taken
        chunk.routed_experts = [pages.read(sequence.blocks.full, start, stop)]

    def _commit_decoded_blocks(self, record: StepRecord, ends: IntArray) -> None:
        """Commit the blocks that decoding rows have just filled."""
        engine, block_size = self._engine, self._engine.limits.block_size
        is_filled = ends[: record.num_decodes] % block_size == 0
        if record.plan.num_drafts is not None:
            # These are committed in ``_commit_drafts``.
            is_filled &= record.plan.num_drafts[: record.num_decodes] == 0
        filled = np.flatnonzero(is_filled)
        if not len(filled):
            return
        rows = record.plan.rows[filled].tolist()
        for row, end in zip(rows, ends[filled].tolist(), strict=True):
            if row not in record.dead_rows:
                engine.commit_blocks(engine.running[row], end)

    def _commit_chunk(
        self, record: StepRecord, entry: int, chunk: ScheduledChunk, result: StepResult
    ) -> None:
        sequence, end = chunk.sequence, chunk.start + chunk.count
        if int(record.plan.rows[entry]) in record.dead_rows:
            return
        self._engine.commit_blocks(sequence, end)
        if chunk.start < sequence.num_prompt <= end:
            self._engine.cache.keep_resumable(sequence.blocks, sequence.block_hashes, sequence.num_prompt)
        state = sequence.request
        if sequence.sampling.prompt_logprobs is not None and not state.prompt_done:
            if state.prompt_logprobs is None:
                state.prompt_logprobs = [None]  # the first prompt token has no context
            # A chunk with only the last prompt token has no log-probabilities.
            state.prompt_logprobs += result.prompt_logprobs.get(entry, [])
        if sequence.is_leader and chunk.start < sequence.num_prompt <= end:
            if not state.prompt_done:
                self._stats.prompt_tokens += sequence.num_prompt
                self._stats.cached_prompt_tokens += state.num_cached_tokens
                self._stats.host_prompt_tokens += state.num_host_tokens
                self._stats.recomputed_prompt_tokens += state.num_recomputed_tokens
            state.prompt_done = True
            self._engine.queue_siblings(state)

    def _commit_tokens(self, record: StepRecord, result: StepResult, ends: IntArray, now: float) -> None:
        engine, plan = self._engine, record.plan
        table, sequences = engine.rows, engine.rows.sequences
        samples, rows, tokens = plan.samples, plan.rows, result.token_ids[:, 0]
        if self._keep_tokens:
            table.record_tokens(rows, tokens)
        slow = table.needs_slow_path[rows] | (ends + 1 >= table.max_len[rows])
        if result.drafts is not None:
            self._keep_drafts(record, result.drafts)
        if record.dead_rows:
            samples = samples & ~np.isin(rows, list(record.dead_rows))
        if plan.num_drafts is not None:
            samples = self._commit_drafts(plan, plan.num_drafts, samples, result, now)
        if result.errors:
            samples = self._end_failed(record, samples, result, now)
        entries: IntArray | None = None
        if not samples.all():
            entries = np.flatnonzero(samples).astype(np.int32)
            rows, tokens, slow = rows[entries], tokens[entries], slow[entries]
        emitted = [sequences[row] for row in rows.tolist()]
        self._stats.generation_tokens += len(emitted)
        emit_chunk = engine.emit
        for position, (sequence, token, is_slow) in enumerate(
            zip(emitted, tokens.tolist(), slow.tolist(), strict=True)
        ):
            assert sequence is not None
            if is_slow or token in sequence.stop_ids:
                entry = position if entries is None else int(entries[position])
                self._take_token(sequence, token, entry, result, now)
            else:
                sequence.output.append(token)
                emit_chunk(TokenChunk(sequence.request_id, sequence.index, [token]))

    def _keep_drafts(self, record: StepRecord, drafts: IntArray) -> None:
        """Keep the drafts that the next plan must contain."""
        rows = record.plan.rows
        for entry in np.flatnonzero(record.plan.samples & ~self._engine.rows.drafts_on_device[rows]).tolist():
            sequence = self._engine.rows.sequences[int(rows[entry])]
            if sequence is not None and int(rows[entry]) not in record.dead_rows:
                sequence.drafts = drafts[entry][drafts[entry] >= 0]

    def _commit_drafts(
        self, plan: StepPlan, num_drafts: IntArray, samples: BoolArray, result: StepResult, now: float
    ) -> BoolArray:
        """Commit the tokens of entries with drafts. Returns ``samples`` without these entries, except those
        that must still end with an error."""
        samples = samples.copy()
        for entry in np.flatnonzero(samples & (num_drafts > 0)).tolist():
            sequence = self._engine.running[int(plan.rows[entry])]
            num_kept = int(result.num_sampled[entry])
            tokens = result.token_ids[entry, :num_kept].tolist()
            self._stats.num_draft_tokens += int(num_drafts[entry])
            has_failed = entry in result.errors  # the failure comes after num_kept tokens
            num_accepted = num_kept if has_failed else num_kept - 1
            self._stats.num_accepted_tokens += num_accepted
            self.accepted_lengths[num_accepted] += 1
            sequence.draft_steps += bytes((int(num_drafts[entry]), num_accepted))
            has_ended = self._take_tokens(sequence, tokens, entry, result, now)
            samples[entry] = has_failed and not has_ended
            if not has_failed and not has_ended:
                self._engine.resume_decode(sequence, num_kept, 1 + int(num_drafts[entry]) - num_kept)
                if self._keep_tokens:
                    self._engine.rows.record_tokens(int(plan.rows[entry]), tokens[-1])
        return samples

    def _take_tokens(
        self, sequence: Sequence, tokens: list[int], entry: int, result: StepResult, now: float
    ) -> bool:
        """Commit several tokens of a sequence, up to the one that ends it. Returns whether it ended.

        None of the tokens is the sequence's first.
        """
        computed_before = sequence.num_tokens - 1
        finish: FinishReason | None = None
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            sequence.output.append(token)
            finish = finish_reason(sequence, token)
            if finish is not None:
                break
        self._stats.generation_tokens += len(taken)
        logprobs = None
        if sequence.sampling.logprobs is not None:
            logprobs = result.logprobs.get(entry, [])[: len(taken)]
        chunk = emit.token_chunk(sequence, taken, logprobs, finish, now, self._engine.served_version)
        self._add_experts(sequence, chunk, len(taken))
        if finish is not None:
            self._engine.commit_blocks(sequence, computed_before + len(taken))
            self._engine.end(sequence, chunk)
        elif taken:
            self._engine.emit(chunk)
        return finish is not None

    def _end_failed(
        self, record: StepRecord, samples: BoolArray, result: StepResult, now: float
    ) -> BoolArray:
        """End the sequences that got no token. Returns ``samples`` without them.

        If the logits were bad, the keys and values that the sequence reads may be bad too: its own blocks,
        those of its prefix hit, and window blocks released meanwhile. None of them may serve another request,
        or one fault would fail every request with that prefix as long as it is cached. A block that another
        sequence wrote after such a prefix causes at most one more failure.
        """
        samples = samples.copy()
        for entry, message in result.errors.items():
            sequence = self._engine.rows.sequences[int(record.plan.rows[entry])]
            if samples[entry] and sequence is not None:
                self._engine.end(sequence, emit.end_chunk(sequence, "error", now, message))
                if entry not in result.forbidden:
                    self._stats.num_corrupted += 1
                    self._engine.invalidate(sequence.block_hashes)
            samples[entry] = False
        return samples

    def _take_token(self, sequence: Sequence, token: int, entry: int, result: StepResult, now: float) -> None:
        """Commit one token that is first, last, or has log-probabilities or experts."""
        engine, sampling = self._engine, sequence.sampling
        first = not sequence.output
        is_slow = sampling.logprobs is not None or sampling.routed_experts_start is not None
        engine.rows.set_slow_path(sequence.row, is_slow)
        if first:
            sequence.first_token = now
        sequence.output.append(token)
        logprobs = result.logprobs.get(entry) if sampling.logprobs is not None else None
        finish = finish_reason(sequence, token)
        token_ids = [token]
        if sampling.max_tokens == 0:  # the request asks for the prompt only
            token_ids, logprobs, finish = [], None, "length"
            self._stats.generation_tokens -= 1
        chunk = emit.token_chunk(sequence, token_ids, logprobs, finish, now, engine.served_version)
        self._add_experts(sequence, chunk, 1)
        if first:
            emit.first_fields(sequence, chunk)
        if finish is None:
            engine.emit(chunk)
        else:
            engine.end(sequence, chunk)


def finish_reason(sequence: Sequence, token: int) -> FinishReason | None:
    """Return why the sequence ends with this token, or None. Stop ids apply only after ``min_tokens`` tokens,
    the maximum length always."""
    if token in sequence.stop_ids and len(sequence.output) > sequence.sampling.min_tokens:
        return "stop"
    if sequence.num_tokens >= sequence.max_len:
        return "length"
    return None
