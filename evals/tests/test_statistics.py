"""Intervals and tests against values computed by hand or by another formula."""

from __future__ import annotations

import math
import random

import pytest
from chorale_evals.comparison import paired
from chorale_evals.record import Record
from chorale_evals.statistics import Interval, clustered, mcnemar, wilson


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)  # the last from Newcombe, Statistics in Medicine 17 (1998), table I
def test_wilson(right: int, count: int, low: float, high: float) -> None:
    interval = wilson(right / count, count)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-4)
    assert right / count in interval


def test_repeats_are_clustered() -> None:
    once = [[1.0], [0.0], [1.0], [1.0], [0.0], [1.0]]
    assert clustered(once) == wilson(4 / 6, 6)
    # Always the same answer: repeats say nothing new.
    assert clustered([one * 8 for one in once]) == wilson(4 / 6, 6)
    varied = [[1.0, 0.0, 1.0, 1.0, 0.0, 1.0]] * 6
    # The same scores for all samples: independent answers.
    assert clustered(varied) == wilson(4 / 6, 36)
    assert clustered([[1.0] * 8] * 10) == wilson(1.0, 10)
    assert clustered([]) == Interval(0.0, 0.0, 1.0)


def test_the_interval_of_clusters_has_its_coverage() -> None:
    """Samples of different difficulty, eight answers each: 95 % of the intervals contain the mean."""
    source = random.Random(7)
    hits = 0
    for _ in range(400):
        difficulties = [source.betavariate(0.6, 0.4) for _ in range(60)]
        scores = [[float(source.random() < each) for _ in range(8)] for each in difficulties]
        hits += 0.6 in clustered(scores)
    assert 0.92 <= hits / 400 <= 0.98


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [(0, 0, 1.0), (0, 1, 1.0), (0, 3, 0.25), (0, 6, 0.03125), (1, 9, 0.021484375), (5, 5, 1.0)],
)  # fmt: skip
def test_mcnemar(b: int, c: int, p: float) -> None:
    assert mcnemar(b, c) == pytest.approx(p)


def test_mcnemar_of_many() -> None:
    exact = 2 * sum(math.comb(2000, k) for k in range(951)) / 2**2000
    assert mcnemar(950, 1050) == pytest.approx(exact)


def record(sample: str, repeat: int, score: float, status: str = "answered") -> Record:
    return Record("t", "low", sample, repeat, status, score, None)  # type: ignore[arg-type]


def test_pairs_are_samples_and_failures_are_left_out() -> None:
    first = [
        record("a", 0, 1),
        record("a", 1, 0),
        record("b", 0, 1),
        record("c", 0, 1),
        record("d", 0, 0, "failed"),
    ]
    second = [record("a", 0, 1), record("a", 1, 1), record("b", 0, 0), record("d", 0, 1)]
    (found,) = paired({r.key: r for r in first}, {r.key: r for r in second})
    assert [(sample, *scores) for sample, scores in found.pairs.items()] == [
        ("a", 0.5, 1.0),
        ("b", 1.0, 0.0),
    ]
    assert (found.better, found.worse, found.alone) == (1, 1, 2)
    assert found.difference.mean == pytest.approx(-0.25)
    assert found.difference.low < -0.25 < found.difference.high


def test_equal_runs_have_an_interval_around_zero() -> None:
    runs = {r.key: r for r in (record(str(i), 0, i % 2) for i in range(100))}
    (found,) = paired(runs, runs)
    assert found.difference.mean == 0
    assert 0.01 < found.difference.high < 0.05
