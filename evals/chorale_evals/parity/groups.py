"""Groups of tokens that are judged separately: by position, by kind, continuations, B against itself.

The ratio of a group is the size of its differences in units of A's own noise: the largest over three
quantiles. A's noise is too small at low quantiles where a batch changes the rounding of few tokens only, as
with bfloat16 on batch-invariant kernels. The noise at each quantile is therefore at least a fixed fraction of
that at 99 %, measured where every token is rounded differently (docs/reference/evaluation.md, "Parity").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from chorale_evals.parity.differences import Pair
from chorale_evals.parity.tally import Floats, Tally, estimate
from chorale_evals.statistics import Estimate

# Two units in the last place of a float32 number between 8 and 16, a usual log-probability.
RESOLUTION = 2e-6
SHAPE = np.array((1 / 8, 1 / 3, 1.0))  # noise at each quantile relative to 99 %
# Largest multiple of A's own noise that counts as rounding: see docs/reference/evaluation.md, "Parity".
WITHIN = 4.0
FIRST_EDGE = 64
B_IN_A_CROWD, B_CONTINUED = "B in a crowd", "B's continuation as a prompt"
FEW_TOKENS = 300  # a group with fewer tokens has no quantile at 99 %


@dataclass(frozen=True, slots=True)
class Group:
    """A group of tokens. ``ratio``: of quantiles of ``tally`` to A's ``noise``, the largest."""

    name: str
    tally: Tally
    noise: Floats  # [3]
    ratio: Estimate

    @property
    def mean(self) -> float:
        return float(self.tally.means()[0, 1])


def noise_of(tallies: Sequence[Tally]) -> Floats:
    """Returns the noise at each quantile [3], the maximum over ``tallies``."""
    found: Floats = RESOLUTION * SHAPE / SHAPE[0]
    for tally in tallies:
        if tally.num_texts:
            own = tally.quantiles()[0]
            found = np.maximum(found, np.maximum(own, own[-1] * SHAPE))
    return found


def make_groups(pairs: Sequence[Pair]) -> list[Group]:
    """Returns the groups that are not empty, "all" first."""
    everywhere = Tally.of([pair.noise_a for pair in pairs])
    both = [everywhere, Tally.of([pair.decode_noise_a for pair in pairs])]
    groups = [_group("all", [pair.delta for pair in pairs], [everywhere])]
    for low, high in spans(pairs):
        own = Tally.of([pair.noise_a[low:high] for pair in pairs])
        name = f"{low}..{high - 1}"
        groups.append(_group(name, [pair.delta[low:high] for pair in pairs], [everywhere, own]))
    for kind in dict.fromkeys(pair.text.kind for pair in pairs):
        members = [pair for pair in pairs if pair.text.kind == kind]
        own = Tally.of([pair.noise_a for pair in members])
        groups.append(_group(kind, [pair.delta for pair in members], [everywhere, own]))
    groups.append(_group("continuation", [pair.decode for pair in pairs], both))
    groups.append(_group(B_IN_A_CROWD, [pair.noise_b for pair in pairs], both))
    groups.append(_group(B_CONTINUED, [pair.decode_noise_b for pair in pairs], both))
    return [*(group for group in groups if group.tally.num_texts), *_worst_text(pairs)]


def _worst_text(pairs: Sequence[Pair]) -> list[Group]:
    """Returns the text that differs most, if beyond A's noise: quantiles over many texts would hide it.

    It is compared with the text in which A's own noise is largest: a token at a tie of the router changes all
    later tokens.
    """
    each = [Tally.of([pair.noise_a]) for pair in pairs]
    noise = noise_of(each)
    sizes = [float((Tally.of([pair.delta]).quantiles()[0] / noise).max()) for pair in pairs]
    size, worst = max(zip(sizes, pairs, strict=True), key=lambda item: item[0])
    return [_group(worst.text.name, [worst.delta], each)] if size > WITHIN else []


def _group(name: str, differences: Sequence[Floats], noise: Sequence[Tally]) -> Group:
    tally, level = Tally.of(differences), noise_of(noise)
    used = slice(0, 3 if tally.num_tokens >= FEW_TOKENS else 2)

    def ratio(weights: Floats) -> Floats:
        found: Floats = (tally.quantiles(weights)[:, used] / level[used]).max(axis=1)
        return found

    return Group(name, tally, level, estimate(tally.num_texts, ratio))


def spans(pairs: Sequence[Pair]) -> list[tuple[int, int]]:
    """Returns [low, high) of the groups by position: up to 63, 64 to 127, 128 to 255, and so on."""
    longest = max(pair.text.length for pair in pairs)
    edges = [1, FIRST_EDGE]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return [(low, min(high, longest)) for low, high in pairwise(edges)]
