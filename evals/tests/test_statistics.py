"""Estimates against values computed by hand or by another formula."""

from __future__ import annotations

import random

import pytest
from chorale_evals.statistics import Estimate, clustered, wilson


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)  # the last from Newcombe, Statistics in Medicine 17 (1998), table I
def test_wilson_intervals_have_known_values(right: int, count: int, low: float, high: float) -> None:
    interval = wilson(right / count, count)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-4)
    assert right / count in interval


def test_repeats_are_clustered() -> None:
    once = [[1.0], [0.0], [1.0], [1.0], [0.0], [1.0]]
    assert clustered(once) == wilson(4 / 6, 6)
    # All repeats have the same score: they add no information.
    assert clustered([one * 8 for one in once]) == wilson(4 / 6, 6)
    varied = [[1.0, 0.0, 1.0, 1.0, 0.0, 1.0]] * 6
    # All samples have the same scores: the answers are independent.
    assert clustered(varied) == wilson(4 / 6, 36)
    assert clustered([[1.0] * 8] * 10) == wilson(1.0, 10)
    assert clustered([]) == Estimate(0.0, 0.0, 1.0)


def test_the_interval_of_clusters_has_its_coverage() -> None:
    """Samples of different difficulty, eight answers each: 95 % of the intervals contain the mean."""
    source = random.Random(7)
    hits = 0
    for _ in range(400):
        difficulties = [source.betavariate(0.6, 0.4) for _ in range(60)]
        scores = [[float(source.random() < each) for _ in range(8)] for each in difficulties]
        hits += 0.6 in clustered(scores)
    assert 0.92 <= hits / 400 <= 0.98
