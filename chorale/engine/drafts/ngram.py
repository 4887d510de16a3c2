"""NgramDrafter: prompt lookup. What followed the last tokens where prompt or output had them before."""

from __future__ import annotations

from chorale.engine.drafts.lookup import TokenBuffer, copied, follow_longest
from chorale.engine.drafts.planner import HostDrafter
from chorale.engine.sequence import NO_TOKENS, Sequence
from chorale.engine.types import IntArray


class NgramDrafter(HostDrafter):
    """Drafts ``num_tokens`` tokens after the longest match of ``least`` to ``most`` tokens."""

    def __init__(self, num_tokens: int, least: int, most: int) -> None:
        self._num_tokens, self._least, self._most = num_tokens, least, most
        self._buffers: dict[Sequence, TokenBuffer] = {}

    def propose(self, sequence: Sequence, most: int) -> IntArray:
        buffer = self._buffers.get(sequence)
        if buffer is None:
            buffer = self._buffers[sequence] = TokenBuffer(sequence.all_tokens())
        buffer.catch_up(sequence)
        tokens = buffer.tokens
        start, length = follow_longest(tokens[-self._most :], tokens, self._least, self._most)
        return copied(tokens, start, min(most, self._num_tokens)) if length else NO_TOKENS

    def end(self, sequence: Sequence) -> None:
        self._buffers.pop(sequence, None)
