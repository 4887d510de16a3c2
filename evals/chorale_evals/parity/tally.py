"""Tally: magnitudes of differences, counted per text, for quantiles and means with intervals over texts.

Tokens of one text are not independent, so intervals come from resampling whole texts (a bootstrap over
clusters). Each text's magnitudes are kept as a histogram of logarithmic bins, 3.5 % wide: a resample is
then a sum of histograms, and memory does not grow with the length of the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from chorale_evals.statistics import Estimate

Floats = npt.NDArray[np.float64]

QUANTILES = (0.5, 0.9, 0.99)
RESAMPLES = 1000
FEW_TEXTS, BLOCK = 5, 64
_LEAST, _MOST, _BINS = 1e-8, 1e3, 736
_EDGES = np.geomspace(_LEAST, _MOST, _BINS + 1)
_VALUES = np.concatenate(([0.0], np.sqrt(_EDGES[:-1] * _EDGES[1:]), [_MOST]))  # bin centres, and both ends


@dataclass(frozen=True, slots=True)
class Tally:
    """``counts`` [texts, bins], ``sums`` [texts, 3]: number, sum and sum of magnitudes of differences."""

    counts: Floats
    sums: Floats
    worst: float

    @classmethod
    def of(cls, texts: Sequence[npt.NDArray[Any]]) -> Tally:
        """Counts the signed differences of each text, without NaN and infinities.

        Fewer than ``FEW_TEXTS`` texts are cut into blocks: one or two clusters give no useful spread.
        """
        counts, sums, worst = [], [], 0.0
        blocks = [text[i : i + BLOCK] for text in texts for i in range(0, len(text), BLOCK)]
        for text in texts if len(texts) >= FEW_TEXTS else blocks:
            values = text[np.isfinite(text)].astype(np.float64)
            if not len(values):
                continue
            sizes = np.abs(values)
            bins = np.searchsorted(_EDGES, sizes, side="right")
            counts.append(np.bincount(bins, minlength=_BINS + 2).astype(np.float64))
            sums.append((len(values), values.sum(), sizes.sum()))
            worst = max(worst, float(sizes.max()))
        return cls(np.array(counts).reshape(-1, _BINS + 2), np.array(sums).reshape(-1, 3), worst)

    @property
    def num_texts(self) -> int:
        return len(self.sums)

    @property
    def num_tokens(self) -> int:
        return int(self.sums[:, 0].sum()) if self.num_texts else 0

    def quantiles(self, weights: Floats | None = None) -> Floats:
        """Returns [resamples, 3]: the quantiles of the magnitudes. ``weights`` [resamples, texts]."""
        cumulative = np.cumsum(self._weighted(self.counts, weights), axis=1)
        wanted = np.array(QUANTILES)[:, None, None] * cumulative[None, :, -1:]
        bins = np.argmax(cumulative[None] >= wanted, axis=2)  # [3, resamples]
        found: Floats = _VALUES[bins].T
        return found

    def means(self, weights: Floats | None = None) -> Floats:
        """Returns [resamples, 2]: the mean difference and the mean magnitude."""
        sums = self._weighted(self.sums, weights)
        return sums[:, 1:] / np.maximum(sums[:, :1], 1.0)

    def mean_difference(self, level: float = 0.95) -> Estimate:
        return estimate(self.num_texts, lambda weights: self.means(weights)[:, 0], level)

    def mean_size(self) -> Estimate:
        return estimate(self.num_texts, lambda weights: self.means(weights)[:, 1])

    @staticmethod
    def _weighted(values: Floats, weights: Floats | None) -> Floats:
        return values.sum(axis=0, keepdims=True) if weights is None else weights @ values


def estimate(num_texts: int, statistic: Callable[[Floats], Floats], level: float = 0.95) -> Estimate:
    """Returns a statistic of the texts with the percentile interval of its resamples; 0 without texts.

    ``statistic`` maps weights [resamples, texts], how often each text is in each resample, to [resamples].
    """
    if not num_texts:
        return Estimate(0.0, 0.0, 0.0)
    draws = np.random.default_rng(0).integers(0, num_texts, (RESAMPLES, num_texts))
    weights = np.zeros((RESAMPLES, num_texts))
    np.add.at(weights, (np.arange(RESAMPLES)[:, None], draws), 1.0)
    value = float(statistic(np.ones((1, num_texts)))[0])
    low, high = np.quantile(statistic(weights), ((1 - level) / 2, (1 + level) / 2))
    return Estimate(value, min(float(low), value), max(float(high), value))
