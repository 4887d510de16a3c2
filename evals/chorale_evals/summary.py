"""The result of a run: one row for each task and effort."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from chorale.requests.usage import TokenUsage
from chorale_evals.record import Record
from chorale_evals.runner import Plan
from chorale_evals.statistics import Estimate, clustered
from chorale_evals.task import Breakdown


@dataclass(slots=True)
class Tally:
    """Running counts of one task at one effort. ``total``: number of answers the run asks for."""

    task: str
    effort: str
    total: int
    samples: int = 0
    repeats: int = 1
    metric: str = "accuracy"
    scores: dict[str, list[float]] = field(default_factory=dict)  # sample id -> scores of its repeats
    num_done: int = 0  # number of records, including failed ones
    num_cut: int = 0
    num_refused: int = 0
    num_failed: int = 0
    usage: TokenUsage = field(default_factory=TokenUsage)
    seconds: float = 0.0
    fingerprints: set[str] = field(default_factory=set)
    breakdowns: list[Breakdown] = field(default_factory=list)

    def add(self, record: Record) -> None:
        self.num_done += 1
        self.usage += record.usage
        self.seconds += record.seconds
        self.num_refused += record.status == "refused"
        self.num_failed += record.status == "failed"
        if record.status == "failed":
            return
        self.num_cut += record.finish == "length"
        self.scores.setdefault(record.sample, []).append(record.score)
        if record.fingerprint:
            self.fingerprints.add(record.fingerprint)

    @property
    def num_scored(self) -> int:
        return self.num_done - self.num_failed

    @property
    def mean(self) -> float | None:
        """The running score, None before the first."""
        return sum(map(sum, self.scores.values())) / self.num_scored if self.num_scored else None

    @property
    def interval(self) -> Estimate:
        return clustered(list(self.scores.values()))

    def to_json(self) -> dict[str, Any]:
        interval, usage = self.interval, self.usage
        same = {name: getattr(self, name) for name in ("task", "effort", "metric", "samples", "repeats")}
        counts = {name: getattr(self, f"num_{name}") for name in ("scored", "cut", "refused", "failed")}
        return same | counts | {
            "score": self.mean, "low": interval.low, "high": interval.high,
            "missing": self.total - self.num_done, "seconds": round(self.seconds, 3),
            "input_tokens": usage.input, "cached_tokens": usage.cached,
            "output_tokens": usage.output, "reasoning_tokens": usage.reasoning,
            "fingerprints": sorted(self.fingerprints),
            "breakdowns": [[one.name, one.score, one.count] for one in self.breakdowns],
        }  # fmt: skip


def tallies(plan: Plan) -> dict[tuple[str, str], Tally]:
    """Returns empty tallies by (task, effort)."""
    found = {}
    for task in plan.tasks:
        number = len(task.samples)
        for effort in plan.efforts:
            total = number * task.repeats
            found[task.name, effort] = Tally(task.name, effort, total, number, task.repeats, task.metric)
    return found


def summarise(plan: Plan, records: Collection[Record]) -> list[Tally]:
    """Returns the rows of a plan. Records outside the plan are ignored."""
    found, wanted = tallies(plan), {trial.key for trial in plan.trials()}
    scores: dict[tuple[str, str], list[tuple[str, float]]] = {key: [] for key in found}
    for record in (record for record in records if record.key in wanted):
        found[record.task, record.effort].add(record)
        if record.status != "failed":
            scores[record.task, record.effort].append((record.group, record.score))
    for task in plan.tasks:
        for effort in plan.efforts:
            if given := scores[task.name, effort]:
                found[task.name, effort].breakdowns = task.breakdowns(given)
    return list(found.values())


def total_usage(given: Iterable[Tally]) -> TokenUsage:
    return sum((tally.usage for tally in given), start=TokenUsage())
