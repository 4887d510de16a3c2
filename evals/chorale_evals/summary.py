"""The result of a run: one row for each task and effort."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chorale.requests.usage import TokenUsage
from chorale_evals.record import Key, Record
from chorale_evals.runner import Plan
from chorale_evals.statistics import Interval, clustered
from chorale_evals.task import Breakdown, Scored


@dataclass(slots=True)
class Tally:
    """Running counts of one task at one effort. ``total``: answers that the run asks for."""

    task: str
    effort: str
    total: int
    samples: int = 0
    repeats: int = 1
    metric: str = "accuracy"
    scores: dict[str, list[float]] = field(default_factory=dict)  # by sample
    num_done: int = 0  # records, failed ones included
    num_scored: int = 0
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
        if not record.is_scored:
            return
        self.num_scored += 1
        self.num_cut += record.is_cut
        self.scores.setdefault(record.sample, []).append(record.score)
        if record.fingerprint:
            self.fingerprints.add(record.fingerprint)

    @property
    def mean(self) -> float | None:
        """The running score, None before the first."""
        total = sum(map(sum, self.scores.values()))
        return total / self.num_scored if self.num_scored else None

    @property
    def interval(self) -> Interval:
        return clustered(list(self.scores.values()))

    def to_json(self) -> dict[str, Any]:
        interval = self.interval
        return {
            "task": self.task,
            "effort": self.effort,
            "metric": self.metric,
            "samples": self.samples,
            "repeats": self.repeats,
            "score": self.mean,
            "low": interval.low,
            "high": interval.high,
            "scored": self.num_scored,
            "cut": self.num_cut,
            "refused": self.num_refused,
            "failed": self.num_failed,
            "missing": self.total - self.num_done,
            "input_tokens": self.usage.input,
            "cached_tokens": self.usage.cached,
            "output_tokens": self.usage.output,
            "reasoning_tokens": self.usage.reasoning,
            "seconds": round(self.seconds, 3),
            "fingerprints": sorted(self.fingerprints),
            "breakdowns": [[one.name, one.score, one.count] for one in self.breakdowns],
        }


def tallies(plan: Plan) -> dict[tuple[str, str], Tally]:
    """Returns an empty tally for each task and effort, in the order of the plan."""
    return {
        (part.task.name, effort): Tally(
            part.task.name, effort, len(part.samples) * part.repeats, len(part.samples), part.repeats,
            getattr(part.task, "metric", "accuracy"),
        )
        for part in plan.parts
        for effort in plan.efforts
    }  # fmt: skip


def summarise(plan: Plan, records: Iterable[Record]) -> list[Tally]:
    """Returns the tallies of the plan's keys, with breakdowns."""
    wanted: Collection[Key] = {job.key for job in plan.jobs()}
    found = tallies(plan)
    by_tally: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.key in wanted:
            found[record.task, record.effort].add(record)
            by_tally.setdefault((record.task, record.effort), []).append(record)
    for part in plan.parts:
        samples = {sample.id: sample for sample in part.samples}
        for effort in plan.efforts:
            mine = by_tally.get((part.task.name, effort), [])
            scored = [Scored(samples[r.sample], r.repeat, r.outcome) for r in mine if r.is_scored]
            found[part.task.name, effort].breakdowns = _breakdowns(part.task, scored)
    return list(found.values())


def _breakdowns(task: Any, scored: Sequence[Scored]) -> list[Breakdown]:
    function = getattr(task, "breakdowns", None)
    return list(function(scored)) if function is not None and scored else []


def cost(usage: TokenUsage, price_input: float | None, price_output: float | None) -> float | None:
    """Returns the price of tokens, None without prices. Prices are per million tokens."""
    if price_input is None and price_output is None:
        return None
    return (usage.input * (price_input or 0.0) + usage.output * (price_output or 0.0)) / 1e6
