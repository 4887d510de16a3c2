"""HeadDrafter: drafts that a head on the device makes at the end of each step.

The next step of a row verifies them on the device, so the plan need not contain them and can be made while
the previous step runs. Only rows whose grammar or logits processors follow every token need them on the host.
For such a row, the plan waits for the step's result, which contains them.

A row whose draft is in flight may be planned again with the next draft, which its step makes on the device.
The row waits for that step's result if it gets no draft (its length is uncertain), or if the host must know
the draft. Blocks: as in ``planner.py``. A row gets new drafts only if it has blocks to verify all of them,
because the head writes their keys and values too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chorale.engine.drafts.planner import by_key, num_slots, room
from chorale.engine.engine_state import Drafter, EngineState, Grow
from chorale.engine.plan import PlannedDrafts, ScheduledChunk
from chorale.engine.sequence import NO_TOKENS, Sequence
from chorale.engine.types import DRAFT, EARLY_STOPS, IntArray

_ON_DEVICE = DRAFT - np.arange(64, dtype=np.int32)  # in place of a draft's tokens


@dataclass(frozen=True, slots=True)
class HeadDrafter(Drafter):
    """Drafts up to ``num_tokens`` tokens per row, unless more than ``most_rows`` rows run."""

    num_tokens: int
    most_rows: int

    def drafts_on_device(self, sequence: Sequence) -> bool:
        return not follows_tokens(sequence)

    def plan(
        self,
        engine: EngineState,
        grow: Grow,
        decodes: IntArray,
        chunks: list[ScheduledChunk],
        budget: int,
        num_spare: int,
    ) -> PlannedDrafts:
        rows, num_made = engine.rows, self._num_made(engine, len(decodes))
        if not num_made:
            return PlannedDrafts(waiting=decodes[rows.is_uncertain[decodes]].tolist())
        if engine.limits.async_scheduling:  # the next step is planned while the drafts hold their blocks
            num_spare -= 2 * len(decodes)
        tokens: dict[int, IntArray] = {}
        waiting, making = [], set()
        for sequence in sorted((engine.running[row] for row in decodes.tolist()), key=by_key):
            row, held = sequence.row, len(sequence.blocks.full)
            if not rows.drafts_on_device[row] and engine.is_in_flight(row):
                waiting.append(row)
                continue
            draft = self._draft(engine, sequence, budget, num_spare)
            if rows.is_uncertain[row] and not len(draft):
                waiting.append(row)
                continue
            if self._extend(engine, grow, sequence, int(rows.computed[row]) + 1 + len(draft), num_spare):
                making.add(row)
            if len(draft):
                tokens[row] = draft
                budget -= len(draft)
            num_spare -= 2 * (len(sequence.blocks.full) - held)
        for chunk in chunks:
            sequence, held = chunk.sequence, len(chunk.sequence.blocks.full)
            if chunk.is_last and self._extend(engine, grow, sequence, chunk.start + chunk.count, num_spare):
                making.add(sequence.row)
            num_spare -= 2 * (len(sequence.blocks.full) - held)
        return PlannedDrafts(tokens, waiting, num_made, frozenset(making))

    def _num_made(self, engine: EngineState, num_rows: int) -> int:
        """Return how many draft tokens the step makes for each row; 0: the head does not run."""
        if len(engine.running) > self.most_rows:
            return 0
        return min(self.num_tokens, engine.limits.drafts_at(num_rows))

    def _draft(self, engine: EngineState, sequence: Sequence, most: int, num_spare: int) -> IntArray:
        rows, row = engine.rows, sequence.row
        most = min(most, room(engine, sequence, num_spare))
        if most < 1:
            return NO_TOKENS
        if rows.drafts_on_device[row]:
            return _ON_DEVICE[: min(most, int(rows.drafted[row]))]
        return sequence.drafts[:most]

    def _extend(
        self, engine: EngineState, grow: Grow, sequence: Sequence, num_tokens: int, num_spare: int
    ) -> bool:
        """Allocate blocks for ``num_tokens``, and for the longest draft after them if there is room. Returns
        whether there was room."""
        # The last token and its draft. A captured step may make more than were requested.
        wanted = num_tokens + 1 + self.num_tokens
        makes = wanted <= min(num_slots(engine, sequence, num_spare), sequence.max_len)
        if makes:
            num_tokens = wanted
        if num_tokens > len(sequence.blocks.full) * engine.limits.block_size:
            grow(sequence, num_tokens)
            engine.schedule_next_check(sequence)
        return makes


def follows_tokens(sequence: Sequence) -> bool:
    """Returns whether the host must know a draft to sample after it."""
    sampling = sequence.sampling
    return bool(
        sampling.grammar
        or sampling.logit_bias
        or sampling.allowed_token_ids is not None
        or sampling.bad_words
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or (sampling.min_tokens > 0 and len(sequence.stop_ids) > EARLY_STOPS)
    )
