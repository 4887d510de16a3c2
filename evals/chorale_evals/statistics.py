"""Confidence intervals of scores. Plain Python is fast enough for sums of a few thousand terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with an interval, in which 95 % of repetitions would be unless something else is said."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{number(self.value)} ({number(self.low)} to {number(self.high)})"

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def wilson(mean: float, count: float) -> Estimate:
    """Returns Wilson's score interval of a proportion ``mean`` among ``count`` independent samples."""
    if count <= 0:
        return Estimate(mean, 0.0, 1.0)
    scale = 1 + Z95 * Z95 / count
    centre = (mean + Z95 * Z95 / (2 * count)) / scale
    half = Z95 / scale * math.sqrt(mean * (1 - mean) / count + Z95 * Z95 / (4 * count * count))
    low = 0.0 if mean <= 0 else max(0.0, centre - half)
    high = 1.0 if mean >= 1 else min(1.0, centre + half)
    return Estimate(mean, low, high)


def clustered(scores: Sequence[Sequence[float]]) -> Estimate:
    """Returns the interval of the mean score. ``scores``: for each sample, the scores of its repeats.

    Repeats of one sample are not independent. Wilson's interval is therefore computed for the effective
    number of samples, m (1 - m) / v, where v is the variance of the mean over clusters: with one repeat and
    scores 0 and 1 it is the ordinary interval. The effective number is between the number of samples and
    the number of answers. If all answers are right or all wrong, it is the number of samples.
    """
    clusters = [one for one in scores if one]
    answers = sum(len(one) for one in clusters)
    if not clusters:
        return Estimate(0.0, 0.0, 1.0)
    mean = sum(sum(one) for one in clusters) / answers
    spread = sum((sum(one) - mean * len(one)) ** 2 for one in clusters) / answers**2
    number = len(clusters)
    if mean in (0.0, 1.0):
        return wilson(mean, number)
    effective = float(answers) if spread <= 0 else mean * (1 - mean) / spread
    return wilson(mean, min(max(effective, number), answers))


def number(value: float) -> str:
    """Formats a number with at most three digits: "0.0213", "3.2e-06", "0"."""
    if value == 0 or math.isnan(value):
        return "0" if value == 0 else "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"
