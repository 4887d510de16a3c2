"""Lookup: where the last tokens of a sequence occurred before, and what followed them there."""

from __future__ import annotations

import numpy as np

from chorale.engine.sequence import Sequence
from chorale.engine.types import IntArray

_FIRST_ROOM = 256


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
        """Append the output that is not here yet."""
        more = sequence.output[self._count - sequence.num_prompt :]
        stop = self._count + len(more)
        if stop > len(self._array):
            grown = np.empty(2 * stop, np.int32)
            grown[: self._count] = self.tokens
            self._array = grown
        self._array[self._count : stop] = more
        self._count = stop


def follow_longest(tail: IntArray, tokens: IntArray, least: int, most: int) -> tuple[int, int]:
    """Find the longest end of ``tail``, of ``least`` to ``most`` tokens, that occurs in ``tokens`` with a
    token after it; the latest such place.

    Returns the index of the token after it and the length; the length is 0 if there is none. Compares whole
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
    """Return ``count`` tokens from ``start`` on. Past the end they repeat from ``start``, as in a loop."""
    found = tokens[start : start + count]
    return found if len(found) == count or not len(found) else np.resize(found, count)
