"""DraftPlanner: which decoding rows of a step get drafts, and of how many tokens.

Drafts take what the rest of the step leaves: tokens of its budget, and blocks that neither an admission
counts on nor a decoding row may need for its next token. Nobody is preempted for a draft; it becomes shorter
instead.

A plan that is made before the last step's result is known may lack the newest token of a sequence. The
drafter then guesses that one too, and the draft is what follows it. So a row without drafts keeps its overlap
and may get one at any time; a row whose draft is in flight waits for its result (``EngineState``).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from chorale.engine.drafts.drafter import Drafter
from chorale.engine.drafts.planned import NO_DRAFTS, PlannedDrafts
from chorale.engine.engine_state import EngineState
from chorale.engine.plan import ScheduledChunk
from chorale.engine.sequence import Sequence
from chorale.engine.types import IntArray

Grow = Callable[[Sequence, int], None]


class DraftPlanner:
    """Asks the drafter for the decoding rows of a step."""

    def __init__(self, engine: EngineState, drafter: Drafter, grow: Grow) -> None:
        """``grow``: gives a sequence blocks for so many tokens and puts them into the plan."""
        self._engine, self._drafter, self._grow = engine, drafter, grow

    def plan(
        self, decodes: IntArray, chunks: list[ScheduledChunk], budget: int, num_spare: int
    ) -> PlannedDrafts:
        """``budget``: tokens; ``num_spare``: blocks."""
        wanted = self._wanted(decodes)
        if not wanted:
            return NO_DRAFTS
        if self._engine.limits.async_scheduling:
            num_spare -= 2 * len(decodes)  # the next step is planned while the drafts hold their blocks
        proposed = self._proposed(wanted, budget, num_spare)
        self._trim(len(decodes), proposed)
        found: dict[int, IntArray] = {}
        for sequence, draft in proposed.items():
            draft = draft[: max(0, self._room(sequence, num_spare))]
            if not len(draft):
                continue
            held = len(sequence.blocks.full)
            self._grow(sequence, int(self._engine.rows.computed[sequence.row]) + 1 + len(draft))
            self._engine.schedule_next_check(sequence)
            found[sequence.row] = draft
            num_spare -= 2 * (len(sequence.blocks.full) - held)
        return PlannedDrafts(found)

    def _wanted(self, decodes: IntArray) -> dict[int, int]:
        """Return how many draft tokens each row may have, of those that may have any."""
        lengths = self._engine.lengths
        if lengths is None:
            return dict.fromkeys(decodes.tolist(), self._engine.limits.max_model_len)
        counts = lengths.choose(decodes, self._engine.next_step_id)
        if counts is None:
            return {}
        pairs = zip(decodes.tolist(), counts.tolist(), strict=True)
        return {row: count for row, count in pairs if count}

    def _proposed(self, wanted: dict[int, int], budget: int, num_spare: int) -> dict[Sequence, IntArray]:
        """Ask the drafter for each row, best key first."""
        engine = self._engine
        found: dict[Sequence, IntArray] = {}
        for sequence in sorted((engine.running[row] for row in wanted), key=_by_key):
            if budget < 1:
                break
            most = min(wanted[sequence.row], budget, self._room(sequence, num_spare))
            if most < 1:
                continue
            computed = int(engine.rows.computed[sequence.row])
            num_unknown = computed - (sequence.num_tokens - 1)  # sampled by the step in flight
            draft = self._drafter.propose(sequence, most + num_unknown)[num_unknown:]
            if len(draft):
                found[sequence] = draft
                budget -= len(draft)
        return found

    def _trim(self, num_rows: int, proposed: dict[Sequence, IntArray]) -> None:
        """Shorten the drafts to what pays, now that it is known which rows have one."""
        if self._engine.lengths is None or not proposed:
            return
        rows = np.array([sequence.row for sequence in proposed], np.int32)
        found = np.array([len(draft) for draft in proposed.values()], np.int32)
        counts = self._engine.lengths.trim(num_rows, rows, found)
        for sequence, count in zip(proposed, counts.tolist(), strict=True):
            proposed[sequence] = proposed[sequence][:count]

    def _room(self, sequence: Sequence, num_spare: int) -> int:
        """Return how many draft tokens the blocks and the sequence's length allow, or less than 1."""
        computed = int(self._engine.rows.computed[sequence.row])
        num_slots = (len(sequence.blocks.full) + max(0, num_spare) // 2) * self._engine.limits.block_size
        # The last token of the row takes a slot, and the token after the draft a place before max_len.
        return min(num_slots - computed - 1, sequence.max_len - computed - 2)


def _by_key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key
