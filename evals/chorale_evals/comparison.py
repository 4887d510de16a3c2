"""The comparison of two runs, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from chorale_evals.record import Key, Record
from chorale_evals.statistics import Z95, Interval, mcnemar


@dataclass(frozen=True, slots=True)
class Paired:
    """The comparison of two runs at one task and effort.

    ``pairs``: by sample, the mean scores of its repeats in both runs. ``difference``: second minus first.
    ``p_value``: exact McNemar if each sample was asked once and scored 0 or 1, else the sign test over the
    samples that differ, which is the same arithmetic. ``alone``: samples in one run only, left out.
    """

    task: str
    effort: str
    pairs: dict[str, tuple[float, float]]
    difference: Interval
    better: int
    worse: int
    p_value: float
    alone: int

    @property
    def means(self) -> tuple[float, float]:
        first, second = zip(*self.pairs.values(), strict=True)
        return sum(first) / len(first), sum(second) / len(second)

    @property
    def differing(self) -> dict[str, tuple[float, float]]:
        return {sample: pair for sample, pair in self.pairs.items() if pair[0] != pair[1]}


def paired(first: Mapping[Key, Record], second: Mapping[Key, Record]) -> list[Paired]:
    """Compares the samples that both runs have a score for, by task and effort."""
    ours, theirs = _means(first.values()), _means(second.values())
    return [
        _compare(*group, ours[group], theirs[group])
        for group in ours
        if group in theirs and ours[group].keys() & theirs[group].keys()
    ]


def _means(records: Iterable[Record]) -> dict[tuple[str, str], dict[str, float]]:
    scores: dict[tuple[str, str], dict[str, list[float]]] = {}
    for record in records:
        if record.is_scored:
            of_group = scores.setdefault((record.task, record.effort), {})
            of_group.setdefault(record.sample, []).append(record.score)
    return {
        group: {sample: sum(values) / len(values) for sample, values in by_sample.items()}
        for group, by_sample in scores.items()
    }


def _compare(task: str, effort: str, first: dict[str, float], second: dict[str, float]) -> Paired:
    pairs = {sample: (value, second[sample]) for sample, value in first.items() if sample in second}
    changes = [after - before for before, after in pairs.values()]
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    alone = len(first.keys() ^ second.keys())
    return Paired(task, effort, pairs, _interval(changes), better, worse, mcnemar(better, worse), alone)


def _interval(changes: Sequence[float]) -> Interval:
    """Returns the mean of the differences with its normal 95 % interval, within -1 to 1.

    One difference each way is added for the width (Agresti and Min), so that few or no differences do not
    give an interval of zero width.
    """
    count = len(changes)
    mean = sum(changes) / count
    total, squares, number = sum(changes), sum(c * c for c in changes) + 2.0, count + 2
    spread = max(0.0, squares / number - (total / number) ** 2)
    half = Z95 * math.sqrt(spread / number)
    centre = total / number
    return Interval(mean, max(-1.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))
