"""Signs of a fault of any size that rounding never shows.

Rounding errors occur from the first positions on and have both signs. A window that is off by one, a wrong
page of the KV cache or wrongly scaled positions take effect only from some position on; a wrong scale, bias
or constant shifts a text's log-probabilities in one direction. A coarser number format also makes a server's
own noise coarser.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chorale_evals.parity.differences import Pair
from chorale_evals.parity.groups import FIRST_EDGE, RESOLUTION, WITHIN, noise_of
from chorale_evals.parity.tally import Floats, Tally, estimate
from chorale_evals.statistics import Estimate

LEAST_TEXTS = 5  # fewest texts for a step or a direction
STEP = 2.0  # least growth of the typical size; texts differ by less, see docs/reference/evaluation.md
ONE_WAY = 0.3  # least |mean difference| as a fraction of the mean magnitude
LEAST_ONSET = 16
EXACT = 1e-3  # noise at 99 % of an exact format, in nats; the demo: float32 2e-5, bfloat16 0.1
LEVEL = 0.99  # of intervals; high because several checks can raise a false alarm
ABOVE_NOISE = 1.5  # a step counts only above this multiple of A's own noise


@dataclass(frozen=True, slots=True)
class Step:
    """``factor``: mean over texts of the size of differences after ``position``, relative to before."""

    position: int
    factor: Estimate
    is_sign: bool

    @property
    def reason(self) -> str:
        grown = f"{self.factor} times those before (with a 99 % interval)"
        return f"differences begin or grow at position {self.position}: {grown}"


@dataclass(frozen=True, slots=True)
class Direction:
    """``mean``: the mean difference (B less A); ``size``: the mean magnitude."""

    mean: Estimate
    size: float
    is_sign: bool

    @property
    def reason(self) -> str:
        mean = self.mean
        return (
            f"differences have one direction: mean {mean.value:+.3g} nats (99 % interval {mean.low:+.3g} to "
            f"{mean.high:+.3g}) of a mean size of {self.size:.3g}"
        )


def find_steps(pairs: Sequence[Pair]) -> list[Step]:
    """Returns a step for every power of two from 128 on that enough texts reach."""
    longest = max(pair.text.length for pair in pairs)
    # The trimmed mean of noise is about 1.3 times its median.
    noise = 1.3 * float(noise_of([Tally.of([pair.noise_a for pair in pairs])])[0]) + RESOLUTION
    steps, position = [], 2 * FIRST_EDGE
    while position + position // 2 <= longest:
        if (step := _step(pairs, position, noise)) is not None:
            steps.append(step)
        position *= 2
    return steps


def _step(pairs: Sequence[Pair], position: int, noise: float) -> Step | None:
    begin, end = position // 2, position + position // 2
    sizes = [
        list(map(_typical, (one.delta[begin:position], one.delta[position:end], one.noise_a[position:end])))
        for one in pairs
        if one.text.length >= end
    ]
    known = [row for row in sizes if math.isfinite(row[0] + row[1])]
    if len(known) < LEAST_TEXTS:
        return None
    before, after, own = np.array(known).T
    logs = np.log(after) - np.log(before)
    log = estimate(len(logs), lambda weights: weights @ logs / len(logs), LEVEL)
    factor = Estimate(math.exp(log.value), math.exp(log.low), math.exp(log.high))
    is_above = float(np.median(after)) > ABOVE_NOISE * max(noise, float(np.median(own)))
    return Step(position, factor, is_above and factor.low > STEP)


def _typical(delta: Floats) -> float:
    """Returns the mean magnitude without the largest tenth, which are tokens near a tie of the router."""
    sizes = np.sort(np.abs(delta[np.isfinite(delta)]))
    if len(sizes) < 16:
        return math.nan
    return float(sizes[: math.ceil(0.9 * len(sizes))].mean()) + RESOLUTION


def find_onset(pairs: Sequence[Pair]) -> int | None:
    """Returns the first position, over all texts, of a difference beyond rounding, if it is not near 0.

    A change of precision shows from the first tokens on; a later onset has another cause.
    """
    bound = WITHIN * float(noise_of([Tally.of([pair.noise_a for pair in pairs])])[-1])
    firsts, later = [], []
    for pair in pairs:
        beyond = np.flatnonzero(np.abs(pair.delta) > bound)
        if len(beyond):
            firsts.append(int(beyond[0]))
            later.append(float(np.nanmedian(np.abs(pair.delta[beyond[0] :]))))
    if len(pairs) < LEAST_TEXTS or 2 * len(firsts) < len(pairs) or np.median(later) < bound:
        return None  # too few, or differences that pass the bound only occasionally
    return min(firsts) if min(firsts) >= LEAST_ONSET else None


def find_exactness(pairs: Sequence[Pair]) -> tuple[float, float] | None:
    """Returns A's and B's own noise at 99 %, in nats, if both are that of float32, else None.

    Coarser number formats have at least a hundred times the noise of float32, so they cannot explain a
    difference then. Zero noise proves nothing: a batch-invariant server has none in any format.
    """
    a = Tally.of([*(pair.noise_a for pair in pairs), *(pair.decode_noise_a for pair in pairs)])
    b = Tally.of([*(pair.noise_b for pair in pairs), *(pair.decode_noise_b for pair in pairs)])
    if not a.num_texts or not b.num_texts:
        return None
    own_a, own_b = float(a.quantiles()[0, -1]), float(b.quantiles()[0, -1])
    return (own_a, own_b) if 0.0 < own_a < EXACT and 0.0 < own_b <= WITHIN * own_a else None


def find_direction(pairs: Sequence[Pair]) -> Direction:
    tally = Tally.of([pair.delta for pair in pairs])
    mean = tally.mean_difference(LEVEL)
    size = float(tally.means()[0, 1])
    nearest = 0.0 if mean.low <= 0.0 <= mean.high else min(abs(mean.low), abs(mean.high))
    # Rounding of size s lowers the expected log-probability by about s squared.
    is_sign = (
        tally.num_texts >= LEAST_TEXTS and size > 2 * RESOLUTION and nearest > ONE_WAY * size + size * size
    )
    return Direction(mean, size, is_sign)
