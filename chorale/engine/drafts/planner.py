"""HostDrafter: decides which decoding rows of a step get drafts, and of how many tokens.

Drafts use only leftover tokens of the step's budget, and blocks that no admission counts on and no decoding
row may need for its next token. No sequence is preempted for a draft; it becomes shorter instead.

A plan that is made before the last step's result is known may lack the newest token of a sequence. The
drafter then guesses that token too, and the draft begins after it. So a row without a draft can be planned
early and still get a draft at any time; a row whose draft is in flight waits for its result
(``EngineState``).
"""

from __future__ import annotations

from chorale.engine.engine_state import Drafter, EngineState, Grow
from chorale.engine.plan import NO_DRAFTS, PlannedDrafts, ScheduledChunk
from chorale.engine.sequence import NO_TOKENS, Sequence
from chorale.engine.types import IntArray


class HostDrafter(Drafter):
    """A drafter that reads tokens on the host."""

    def propose(self, sequence: Sequence, most: int) -> IntArray:
        """Return up to ``most`` tokens, all of them valid ids, that may follow prompt and output. Returns an
        empty array if there is no good guess: a rejected draft costs device time.
        """
        raise NotImplementedError

    def plan(
        self,
        engine: EngineState,
        grow: Grow,
        decodes: IntArray,
        chunks: list[ScheduledChunk],
        budget: int,
        num_spare: int,
    ) -> PlannedDrafts:
        found = dict[int, IntArray]()
        most = engine.limits.drafts_at(len(decodes))
        if not most:
            return NO_DRAFTS
        if engine.limits.async_scheduling:
            num_spare -= 2 * len(decodes)  # the next step is planned while the drafts hold their blocks
        for sequence in sorted((engine.running[row] for row in decodes.tolist()), key=by_key):
            if budget < 1:
                break
            draft = self._draft(engine, sequence, min(most, budget, room(engine, sequence, num_spare)))
            if not len(draft):
                continue
            held = len(sequence.blocks.full)
            grow(sequence, int(engine.rows.computed[sequence.row]) + 1 + len(draft))
            engine.schedule_next_check(sequence)
            found[sequence.row] = draft
            budget -= len(draft)
            num_spare -= 2 * (len(sequence.blocks.full) - held)
        return PlannedDrafts(found)

    def _draft(self, engine: EngineState, sequence: Sequence, most: int) -> IntArray:
        if most < 1:
            return NO_TOKENS
        # Tokens that the step in flight samples are unknown.
        num_unknown = int(engine.rows.computed[sequence.row]) - (sequence.num_tokens - 1)
        return self.propose(sequence, most + num_unknown)[num_unknown:]


def room(engine: EngineState, sequence: Sequence, num_spare: int) -> int:
    """Return how many draft tokens the blocks and the sequence's length allow, or less than 1."""
    computed = int(engine.rows.computed[sequence.row])
    # The row's last token takes a slot, and the token after the draft must fit before max_len.
    return min(num_slots(engine, sequence, num_spare) - computed - 1, sequence.max_len - computed - 2)


def num_slots(engine: EngineState, sequence: Sequence, num_spare: int) -> int:
    """Return how many tokens fit the sequence's own blocks and the spare ones."""
    return (len(sequence.blocks.full) + max(0, num_spare) // 2) * engine.limits.block_size


def by_key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key
