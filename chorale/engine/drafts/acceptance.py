"""Acceptance: how likely the first 1, 2, ... tokens of a row's next draft are accepted.

Counted for each row with decay. A new row starts from the mean over the recent drafts of this engine, and a
row that gets no drafts returns to it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chorale.engine.types import IntArray

Floats = npt.NDArray[np.float64]

_HOPE = 4.0  # accepted tokens that are added to the engine's: what is little known is rather tried
_MEAN_WEIGHT = 16.0  # drafts of a row that the engine's mean counts as, until rows are compared
_WEIGHTS = (2.0, 32.0)  # the least and the most: rows differ much, or not at all
_COMPARED = 4, 8.0  # rows, and drafts of each, that are enough to compare rows
_SLOWLY = 0.1  # share of a new comparison
_ROW_DECAY = 0.97  # of a row's counts, by draft: about the last 30 count
_MEAN_DRAFTS = 512  # the last so many drafts make the engine's mean
_FORGET = 0.98  # of every row's counts, at each ``relax``


class Acceptance:
    """Counts of tried and accepted tokens by position, of each row and of the engine."""

    def __init__(self, num_rows: int, most: int) -> None:
        self._places = np.arange(most)
        self._tried = np.zeros((num_rows, most))
        self._passed = np.zeros((num_rows, most))
        self._weight = _MEAN_WEIGHT
        self._all_tried = np.zeros(most)
        self._all_passed = np.zeros(most)

    def forget(self, row: int) -> None:
        """Begin with a new sequence in a row."""
        self._tried[row] = 0
        self._passed[row] = 0

    def relax(self) -> None:
        """Let old counts weigh less, and compare rows: if they differ much, their mean says little of one."""
        self._compare()
        self._tried *= _FORGET
        self._passed *= _FORGET

    def observe(self, rows: IntArray, drafted: IntArray, accepted: IntArray) -> None:
        """Count drafts of ``drafted`` tokens, of which the first ``accepted`` were accepted."""
        places = self._places
        tried = places < np.minimum(drafted, accepted + 1)[:, None]
        passed = places < accepted[:, None]
        decay = np.where(tried, _ROW_DECAY, 1.0)
        self._tried[rows] = self._tried[rows] * decay + tried
        self._passed[rows] = self._passed[rows] * decay + passed
        more = tried.sum(axis=0)
        kept = np.maximum(0.0, 1 - more / _MEAN_DRAFTS)
        self._all_tried = self._all_tried * kept + more
        self._all_passed = self._all_passed * kept + passed.sum(axis=0)

    def expected(self, rows: IntArray) -> Floats:
        """Return [rows, positions]: the probability that a draft is accepted up to that position."""
        mean = (self._all_passed + _HOPE) / (self._all_tried + _HOPE)
        each = (self._passed[rows] + self._weight * mean) / (self._tried[rows] + self._weight)
        return np.asarray(np.cumprod(each, axis=1))

    def _compare(self) -> None:
        """Set the mean's weight by how far rows differ in their first draft token, beyond chance."""
        tried = self._tried[:, 0]
        enough = tried >= _COMPARED[1]
        if np.count_nonzero(enough) < _COMPARED[0]:
            return
        tried = tried[enough]
        rates = self._passed[enough, 0] / tried
        mean = float(rates.mean())
        spread = mean * (1 - mean)
        excess = float(rates.var()) - spread * float((1 / tried).mean())
        least, most = _WEIGHTS
        weight = most if excess * most <= spread else max(least, spread / excess - 1)
        self._weight *= (weight / self._weight) ** _SLOWLY
