"""SuffixDrafter: what followed the last tokens earlier in the sequence, or in answers that ended recently.

A longer match is a better reason for a guess, so a draft is at most as long as the match that it continues,
or a multiple of it.

Only requests of the same ``cache_salt`` look up an answer. Otherwise the speed of one tenant's stream would
reveal what is in another's answers.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from chorale.engine.drafts.lookup import TokenBuffer, copied, follow_longest
from chorale.engine.drafts.planner import HostDrafter
from chorale.engine.sequence import NO_TOKENS, Sequence
from chorale.engine.types import IntArray

_BETWEEN = -1  # between two answers
_MOST_SALTS = 16  # whose answers are kept; those of the salt that was used least recently go first


class RecentAnswers:
    """The newest answers of one salt, up to ``capacity`` tokens."""

    __slots__ = ("_array", "_count")

    def __init__(self, capacity: int) -> None:
        self._array: IntArray = np.empty(capacity, np.int32)
        self._count = 0

    @property
    def tokens(self) -> IntArray:
        return self._array[: self._count]

    def add(self, answer: list[int]) -> None:
        """Add an answer. When there is no room, the older half goes, and as much more as is needed."""
        capacity = len(self._array)
        new = np.array([_BETWEEN, *answer[-(capacity // 2) :]], np.int32)[:capacity]
        if self._count + len(new) > capacity:
            kept = self.tokens[max(self._count // 2, self._count + len(new) - capacity) :].copy()
            self._array[: len(kept)] = kept
            self._count = len(kept)
        self._array[self._count : self._count + len(new)] = new
        self._count += len(new)


class SuffixDrafter(HostDrafter):
    """Drafts up to ``num_tokens`` tokens after the longest match of up to ``most`` tokens."""

    def __init__(
        self,
        num_tokens: int,
        *,
        least: int = 2,
        most: int = 32,
        factor: float = 1.0,
        capacity: int = 65_536,
    ) -> None:
        """``factor``: draft tokens for each token of the match. ``capacity``: tokens of answers that are kept
        for each salt; 0 keeps none."""
        self._num_tokens, self._least, self._most, self._capacity = num_tokens, least, most, capacity
        self._factor = factor
        self._buffers: dict[Sequence, TokenBuffer] = {}
        self._answers: OrderedDict[str, RecentAnswers] = OrderedDict()

    def propose(self, sequence: Sequence, most: int) -> IntArray:
        buffer = self._buffers.get(sequence)
        if buffer is None:
            buffer = self._buffers[sequence] = TokenBuffer(sequence.all_tokens())
        buffer.catch_up(sequence)
        own = buffer.tokens
        tail = own[-self._most :]
        start, length = follow_longest(tail, own, self._least, self._most)
        answers = self._answers.get(sequence.request.request.cache_salt)
        if answers is not None:
            other_start, other_length = follow_longest(tail, answers.tokens, self._least, self._most)
            if other_length > length:
                found = answers.tokens[other_start : other_start + self._count(most, other_length)]
                ends = np.flatnonzero(found == _BETWEEN)
                return found[: ends[0]].copy() if len(ends) else found.copy()
        return copied(own, start, self._count(most, length)) if length else NO_TOKENS

    def _count(self, most: int, length: int) -> int:
        return min(most, self._num_tokens, int(self._factor * length))

    def end(self, sequence: Sequence) -> None:
        self._buffers.pop(sequence, None)
        if not sequence.output:
            return
        salt = sequence.request.request.cache_salt
        if salt not in self._answers:
            self._answers[salt] = RecentAnswers(self._capacity)
            if len(self._answers) > _MOST_SALTS:
                self._answers.popitem(last=False)
        self._answers.move_to_end(salt)
        self._answers[salt].add(sequence.output)
