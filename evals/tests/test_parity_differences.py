"""Differences of two readings, checked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from chorale_evals.parity.differences import compare
from chorale_evals.parity.recording import Reading, Recording, Scores
from chorale_evals.parity.texts import Text

NAN = math.nan


def scores(token: list[float], ids: list[list[int]], shares: list[list[float]]) -> Scores:
    with np.errstate(divide="ignore"):
        top = np.log(np.array(shares, np.float32))
    return Scores(np.array(token, np.float32), top, np.array(ids))


TEXT = Text("t", "prose", 3, (1, 2, 3))
IDS = [[-1, -1], [2, 7], [7, 3]]
A = Reading(
    TEXT,
    alone=scores([NAN, -1.0, -2.0], IDS, [[NAN, NAN], [0.5, 0.25], [0.5, 0.25]]),
    greedy=(4, 5, 6),
    greedy_scores=scores([-0.1, -0.2, -0.3], [[4, 8], [5, 8], [6, 8]], [[0.9, 0.05], [0.8, 0.1], [0.7, 0.2]]),
    continuation=(4, 5, 6),
    again=scores([NAN, -1.5, -2.0, -0.1, -0.25, -0.3], [[-1, -1]] * 6, [[NAN, NAN]] * 6),
)
B = replace(
    A,
    alone=scores([NAN, -1.25, -2.0], [[-1, -1], [2, 7], [3, 9]], [[NAN, NAN], [0.25, 0.25], [0.5, 0.25]]),
    greedy=(4, 8, 8),
    greedy_scores=scores([-0.4, -0.5, -0.6], [[4, 8], [8, 9], [8, 9]], [[0.7, 0.1], [0.6, 0.2], [0.6, 0.2]]),
)


def pair(a: Reading, b: Reading):  # type: ignore[no-untyped-def]
    (found,) = compare(Recording((a,), 2), Recording((b,), 2))
    return found


def test_differences_are_b_minus_a_for_each_token() -> None:
    found = pair(A, B)
    np.testing.assert_allclose(found.delta, [NAN, -0.25, 0.0])
    np.testing.assert_allclose(found.noise_a, [NAN, -0.5, 0.0])
    np.testing.assert_allclose(found.noise_b, [NAN, -0.25, 0.0])


def test_candidates_are_compared_by_kl_likeliest_token_and_overlap() -> None:
    found = pair(A, B)
    both = 0.5 * math.log(2) + 0.25 * math.log(
        0.25 / 0.5
    )  # token 7 is equally likely; the rest has 0.25 and 0.5
    one = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)  # only token 3 is among both candidates
    np.testing.assert_allclose(found.kl, [NAN, both, one], rtol=1e-5)
    np.testing.assert_array_equal(found.same_first, [NAN, 1.0, 0.0])
    np.testing.assert_array_equal(found.overlap, [NAN, 1.0, 0.5])


def test_continuations_are_compared_up_to_the_first_different_token() -> None:
    found = pair(A, B)
    np.testing.assert_allclose(found.decode, [-0.3], rtol=1e-5)
    np.testing.assert_allclose(found.decode_noise_a, [0.0, -0.05, 0.0], atol=1e-6)
    np.testing.assert_allclose(
        found.decode_noise_b, [0.3], rtol=1e-5
    )  # B's continuation equals A's for one token
    where = found.divergence
    assert where is not None
    assert (where.place, where.token_a, where.token_b, found.num_greedy) == (1, 5, 8, 2)
    assert where.margin_a == pytest.approx(-0.2 - math.log(0.1), rel=1e-5)
    # B's candidates do not have token 5: it is below the last of them.
    assert where.margin_b == pytest.approx(-0.5 - math.log(0.2), rel=1e-5)
    assert where.at_least


def test_equal_continuations_have_no_divergence() -> None:
    assert pair(A, A).divergence is None
    shorter = replace(B, greedy=(4,))
    assert pair(A, shorter).divergence is None
