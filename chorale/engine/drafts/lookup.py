"""Drafts by lookup: the tokens after an earlier occurrence of a sequence's last tokens.

``NgramDrafter`` searches prompt and output, ``SuffixDrafter`` also recent answers. There, a longer match
makes a better guess, so a draft is at most as long as the match that it continues, or a fixed multiple of it.

An answer is used only for requests of the same ``cache_salt``. Otherwise the speed of one tenant's stream
would reveal the contents of another's answers.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from chorale.engine.drafts.planner import HostDrafter
from chorale.engine.sequence import NO_TOKENS, Sequence
from chorale.engine.types import IntArray

_FIRST_ROOM = 256
_BETWEEN = -1  # separates two answers
_MOST_SALTS = 16  # with answers; the least recently used salt is dropped first


class TokenBuffer:
    """The tokens of a sequence in one growing array."""

    __slots__ = ("_array", "_count")

    def __init__(self, tokens: IntArray) -> None:
        self._count = len(tokens)
        self._array = np.empty(self._count + _FIRST_ROOM, np.int32)
        self._array[: self._count] = tokens

    @property
    def tokens(self) -> IntArray:
        return self._array[: self._count]

    def catch_up(self, sequence: Sequence) -> None:
        """Append the output tokens that are not in the buffer yet."""
        more = sequence.output[self._count - sequence.num_prompt :]
        stop = self._count + len(more)
        if stop > len(self._array):
            grown = np.empty(2 * stop, np.int32)
            grown[: self._count] = self.tokens
            self._array = grown
        self._array[self._count : stop] = more
        self._count = stop


def follow_longest(tail: IntArray, tokens: IntArray, least: int, most: int) -> tuple[int, int]:
    """Find the longest suffix of ``tail``, of ``least`` to ``most`` tokens, that occurs in ``tokens`` before
    its last token; of several occurrences, the latest.

    Returns the index of the token after it and its length; the length is 0 if there is none. Compares whole
    arrays instead of keeping an index, which would have to be built for every prompt.
    """
    most = min(most, len(tail))
    if most < least:
        return 0, 0
    ends = np.flatnonzero(tokens[:-1] == tail[-1])
    length = 1
    while len(ends) and length < most:
        longer = ends[(ends >= length) & (tokens[ends - length] == tail[-1 - length])]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if not len(ends) or length < least:
        return 0, 0
    return int(ends[-1]) + 1, length


def copied(tokens: IntArray, start: int, count: int) -> IntArray:
    """Return ``count`` tokens from ``start`` on. If there are fewer, they repeat from ``start``."""
    found = tokens[start : start + count]
    return found if len(found) == count or not len(found) else np.resize(found, count)


class LookupDrafter(HostDrafter):
    """Keeps the tokens of each sequence for which it proposes drafts."""

    def __init__(self, num_tokens: int, least: int, most: int) -> None:
        """Drafts up to ``num_tokens`` tokens after the longest match of ``least`` to ``most`` tokens."""
        self._num_tokens, self._least, self._most = num_tokens, least, most
        self._buffers: dict[Sequence, TokenBuffer] = {}

    def _tokens(self, sequence: Sequence) -> IntArray:
        """Return prompt and output."""
        buffer = self._buffers.get(sequence)
        if buffer is None:
            buffer = self._buffers[sequence] = TokenBuffer(sequence.all_tokens())
        buffer.catch_up(sequence)
        return buffer.tokens

    def end(self, sequence: Sequence) -> None:
        self._buffers.pop(sequence, None)


class NgramDrafter(LookupDrafter):
    """Prompt lookup."""

    def propose(self, sequence: Sequence, most: int) -> IntArray:
        tokens = self._tokens(sequence)
        start, length = follow_longest(tokens[-self._most :], tokens, self._least, self._most)
        return copied(tokens, start, min(most, self._num_tokens)) if length else NO_TOKENS


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
        """Add an answer. When there is no room, at least the older half is dropped, and more if needed."""
        capacity = len(self._array)
        new = np.array([_BETWEEN, *answer[-(capacity // 2) :]], np.int32)[:capacity]
        if self._count + len(new) > capacity:
            kept = self.tokens[max(self._count // 2, self._count + len(new) - capacity) :].copy()
            self._array[: len(kept)] = kept
            self._count = len(kept)
        self._array[self._count : self._count + len(new)] = new
        self._count += len(new)


class SuffixDrafter(LookupDrafter):
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
        """``factor``: draft tokens for each token of the match. ``capacity``: answer tokens kept for each
        salt; 0 keeps none."""
        super().__init__(num_tokens, least, most)
        self._capacity, self._factor = capacity, factor
        self._answers: OrderedDict[str, RecentAnswers] = OrderedDict()

    def propose(self, sequence: Sequence, most: int) -> IntArray:
        own = self._tokens(sequence)
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
        super().end(sequence)
        if not sequence.output:
            return
        salt = sequence.request.request.cache_salt
        if salt not in self._answers:
            self._answers[salt] = RecentAnswers(self._capacity)
            if len(self._answers) > _MOST_SALTS:
                self._answers.popitem(last=False)
        self._answers.move_to_end(salt)
        self._answers[salt].add(sequence.output)
