"""StepCosts: how long a step takes by its rows and the tokens that it computes of each.

A table may be given at the start (``prefill``); steps correct it (``observe``). Where nothing was measured,
an estimate is rather too low than too high, because a choice that relies on it is then tried and measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Tokens a row at which costs are kept. A step in which only some rows have drafts lies between 1 and 2; as it
# may already run other kernels than one without drafts, there is no interpolation between 1 and the next.
PLACES: Floats = np.array([1.0, 1.25, 1.5, *range(2, 18)])
_ORDER = PLACES.tolist()
_EXACT = 8  # numbers of rows up to this have costs each; further ones share them in ranges of about 19 %
_STEADY = 10  # measurements after which each counts a tenth
_MOST = 2.0  # factor by which one measurement may change a cost upwards: a step may have had to wait
_MUCH_LESS = 0.6  # a measurement below this share of the estimate counts at once


class StepCosts:
    """Seconds of steps. ``tokens_per_row`` is the mean over the step's rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, Floats] = {}  # range of rows -> seconds at PLACES; nan: not known
        self._counts: dict[int, Floats] = {}

    def prefill(self, table: Mapping[tuple[int, int], float]) -> None:
        """Start from measured seconds by (rows, tokens of each row)."""
        for (rows, tokens), seconds in table.items():
            place = int(np.argmin(abs(PLACES - tokens)))
            self._row(rows)[place] = seconds
            self._counts[range_of(rows)][place] = _STEADY

    def knows(self, rows: int) -> bool:
        """Returns whether a step of so many rows without drafts was measured."""
        own = self._seconds.get(range_of(rows))
        return own is not None and not math.isnan(own[0])

    def is_measured(self, rows: int, tokens_per_row: float) -> bool:
        """Returns whether steps of about so many tokens were measured twice: the first may have waited for a
        kernel or a graph."""
        counts = self._counts.get(range_of(rows))
        return counts is not None and bool(counts[int(np.argmin(abs(PLACES - tokens_per_row)))] >= 2)

    def seconds(self, rows: int, tokens_per_row: float) -> float:
        return float(at(self.curve(rows), np.array([tokens_per_row]))[0])

    def curve(self, rows: int) -> Floats:
        """Return the seconds at ``PLACES``, which do not fall. 0 if nothing is known at all."""
        own = self._seconds.get(range_of(rows))
        known = None if own is None else ~np.isnan(own)
        shape = self._shape(rows)
        if own is None or known is None or not known.any():
            return shape
        last = int(np.flatnonzero(known)[-1])
        found = np.interp(PLACES, PLACES[known], own[known])
        if shape[last] > 0:
            found[last:] = own[last] * shape[last:] / shape[last]
        return np.maximum.accumulate(found)

    def _shape(self, rows: int) -> Floats:
        """Return the curve of the nearest range of fewer rows, or else of more, that knows costs of drafts,
        or a flat one."""
        place = range_of(rows)
        others = [each for each in self._seconds if each != place and not np.isnan(self._seconds[each][0])]
        drafted = [each for each in others if not np.isnan(self._seconds[each][1:]).all()]
        if drafted:
            lower = [each for each in drafted if each < place]
            seconds = self._seconds[max(lower) if lower else min(drafted)]
            known = ~np.isnan(seconds)
            return np.maximum.accumulate(np.interp(PLACES, PLACES[known], seconds[known]))
        nearest = min(others, key=lambda each: abs(each - place), default=None)
        return np.full(len(PLACES), 0.0 if nearest is None else self._seconds[nearest][0])

    def observe(self, rows: int, tokens_per_row: float, seconds: float) -> None:
        """Learn from a step that took ``seconds``."""
        if seconds <= 0 or not 1 <= tokens_per_row <= PLACES[-1]:
            return
        own, counts = self._row(rows), self._counts[range_of(rows)]
        upper = bisect_left(_ORDER, tokens_per_row)
        lower = upper if _ORDER[upper] == tokens_per_row or upper <= 1 else upper - 1
        near = upper if tokens_per_row * 2 >= _ORDER[lower] + _ORDER[upper] else lower
        if math.isnan(own[near]):
            # It may have waited for a kernel or a graph. No step is slower than one for each token.
            own[near] = seconds if math.isnan(own[0]) else min(seconds, own[0] * tokens_per_row)
            counts[near] = 1
        elif lower == upper:
            _correct(own, counts, upper, seconds / own[upper], 1.0)
        else:
            ratio = seconds / self.seconds(rows, tokens_per_row)
            above = (tokens_per_row - _ORDER[lower]) / (_ORDER[upper] - _ORDER[lower])
            _correct(own, counts, lower, ratio, 1 - above)
            _correct(own, counts, upper, ratio, above)

    def _row(self, rows: int) -> Floats:
        place = range_of(rows)
        if place not in self._seconds:
            self._seconds[place] = np.full(len(PLACES), np.nan)
            self._counts[place] = np.zeros(len(PLACES))
        return self._seconds[place]


def _correct(own: Floats, counts: Floats, place: int, ratio: float, share: float) -> None:
    """Correct one cost by a measurement of ``ratio`` times the estimate, which is ``share`` about it."""
    if math.isnan(own[place]):
        return
    counts[place] = min(counts[place] + share, _STEADY)
    weight = 0.75 if ratio < _MUCH_LESS else 1 / counts[place]
    own[place] *= 1 + weight * share * (min(ratio, _MOST) - 1)


def at(curve: Floats, tokens_per_row: Floats) -> Floats:
    """Return the seconds of a curve at any numbers of tokens a row."""
    found = np.interp(tokens_per_row, PLACES, curve)
    few = (tokens_per_row > 1) & (tokens_per_row < PLACES[1])
    return np.where(few, curve[1], found)


def range_of(rows: int) -> int:
    return rows if rows <= _EXACT else _EXACT + round(4 * math.log2(rows / _EXACT))
