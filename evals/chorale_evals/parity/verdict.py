"""The verdict: equal up to rounding, a different precision, or a different model.

The bounds come from the measurements in docs/reference/evaluation.md, "Parity".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from chorale_evals.parity import signs
from chorale_evals.parity.differences import Divergence, Pair
from chorale_evals.parity.groups import B_CONTINUED, B_IN_A_CROWD, WITHIN, Group, make_groups, noise_of
from chorale_evals.parity.tally import Tally
from chorale_evals.statistics import Estimate

Verdict = Literal["equal", "precision", "different", "inconclusive"]
Expected = Literal["equal", "bf16", "fp8-kv"]
TITLES: dict[Verdict, str] = {
    "equal": "equal up to rounding",
    "precision": "different precision",
    "different": "different model",
    "inconclusive": "inconclusive",
}
# Largest mean magnitude of differences, in nats, that each change of precision explains.
BOUNDS: dict[str, float] = {"bf16": 0.1, "fp8-kv": 0.5}
# Multiples of that bound for the quantile at 99 %, the worst token and the size of a divergence.
LARGEST = {"mean": 1.0, "p99": 7.0, "worst": 40.0, "divergence": 5.0}


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result. ``precision``: the smallest of ``BOUNDS`` that explains the differences, or None."""

    verdict: Verdict
    precision: str | None
    reasons: tuple[str, ...]
    groups: tuple[Group, ...]
    onset: int | None  # position before which all texts are equal up to rounding, if any
    steps: tuple[signs.Step, ...]
    direction: signs.Direction
    size: Estimate  # mean magnitude over all tokens of the texts
    divergences: tuple[tuple[str, Divergence], ...]  # (name of the text, divergence)
    large_divergence: float  # in nats; a larger divergence is not a tie

    def meets(self, expected: Expected) -> bool:
        """Returns whether the verdict is ``expected`` or better."""
        if self.verdict == "precision" and self.precision is not None:
            return expected != "equal" and BOUNDS[self.precision] <= BOUNDS[expected]
        return self.verdict == "equal"


def judge(pairs: Sequence[Pair], formats: str | None = None) -> Judgement:
    """Returns the verdict. ``formats``: number formats of both servers, if they are known to be equal."""
    groups, steps, direction = make_groups(pairs), signs.find_steps(pairs), signs.find_direction(pairs)
    tally = Tally.of([pair.delta for pair in pairs])
    size = tally.mean_size()
    divergences = [(pair.text.name, pair.divergence) for pair in pairs if pair.divergence is not None]
    noise = noise_of([Tally.of([*(p.noise_a for p in pairs), *(p.decode_noise_a for p in pairs)])])
    large = 2 * WITHIN * float(noise[-1])
    beyond = _beyond(groups, divergences, large)
    onset = signs.find_onset(pairs) if beyond else None
    shown = [] if onset is None else [
        f"up to position {onset - 1} all texts are equal up to rounding, from there on they are not"
    ]  # fmt: skip
    shown += [step.reason for step in steps if step.is_sign]
    shown += [direction.reason] if direction.is_sign else []
    if beyond and (exactness := signs.find_exactness(pairs)) is not None:
        own = "B's own noise is {1:.2g} nats at 99 %, no coarser than A's {0:.2g}".format(*exactness)
        shown.append(f"no number format explains it: {own}")
    if beyond and formats is not None:
        shown.append(f"no number format explains it: both compute in the same ({formats})")
    precision, fault = _precision(groups, size, tally, divergences)
    verdict: Verdict
    if not shown and not beyond:
        unsure = [group for group in groups if group.ratio.value > WITHIN]
        verdict, nearest = "equal", max(groups, key=lambda one: one.ratio.value)
        reasons = [f"the largest ratio is that of {_ratio_sentence(nearest)}"]
        if unsure:
            verdict, reasons = "inconclusive", [_ratio_sentence(group) for group in unsure]
    elif shown or precision is None:
        verdict, reasons = "different", [*shown, *beyond, *([fault] if precision is None else [])]
    else:
        verdict, reasons = "precision", [*beyond, _precision_reason(size, precision, tally, pairs)]
    return Judgement(
        verdict, precision, tuple(reasons), tuple(groups), onset, tuple(steps), direction, size,
        tuple(divergences), large,
    )  # fmt: skip


def _precision(
    groups: Sequence[Group], size: Estimate, tally: Tally, divergences: Sequence[tuple[str, Divergence]]
) -> tuple[str | None, str]:
    """Returns (the smallest of ``BOUNDS`` that explains the differences or None, reason if None)."""
    crowded = [group.mean for group in groups if group.name in (B_IN_A_CROWD, B_CONTINUED)]
    found = {
        "mean": max(size.high, *crowded, 0.0),
        "p99": float(tally.quantiles()[0, -1]),
        "worst": max((group.tally.worst for group in groups), default=0.0),
        "divergence": max((one.size for _, one in divergences), default=0.0),
    }
    largest = max(found, key=lambda name: found[name] / LARGEST[name])
    needed = found[largest] / LARGEST[largest]
    precision = next((name for name, bound in BOUNDS.items() if needed <= bound), None)
    return precision, f"{largest} {found[largest]:.3g} nats: no change of precision explains it"


def _beyond(
    groups: Sequence[Group], divergences: Sequence[tuple[str, Divergence]], large: float
) -> list[str]:
    found = [group for group in groups if group.ratio.low > WITHIN]
    reasons = [_ratio_sentence(max(found, key=lambda group: group.ratio.value))] if found else []
    parted = [one for one in divergences if one[1].size > large]
    if parted:
        text, one = max(parted, key=lambda item: item[1].size)
        reasons.append(
            f"{len(parted)} continuation{'s' * (len(parted) != 1)} at temperature 0 part where it is no tie: "
            f"{text} after {one.place} tokens, by {one.size:.3g} nats"
        )
    return reasons


def _ratio_sentence(group: Group) -> str:
    interval = f"{group.ratio} times A's own noise (with a 95 % interval; rounding: up to {WITHIN:g})"
    return f"{group.name}: differences {interval}"


def _precision_reason(size: Estimate, precision: str, tally: Tally, pairs: Sequence[Pair]) -> str:
    own = noise_of([Tally.of([*(p.noise_b for p in pairs), *(p.decode_noise_b for p in pairs)])])
    explained = "; as large as B's own noise" if np.all(tally.quantiles()[0] <= WITHIN * own) else ""
    return (
        f"mean |difference| {size.value:.3g} nats (to {size.high:.3g}), in both directions, "
        f"at all positions: within the bound of {precision}, {BOUNDS[precision]:g}{explained}"
    )
