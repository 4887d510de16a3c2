"""The result of a run: one row for each task and effort."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chorale.requests.usage import TokenUsage
from chorale_evals.record import Record
from chorale_evals.statistics import Estimate, clustered
from chorale_evals.task import Task


@dataclass(slots=True)
class Tally:
    """Running counts of one task at one effort."""

    task: Task
    effort: str
    scores: dict[str, list[float]] = field(default_factory=dict)  # sample id -> scores of its repeats
    groups: list[tuple[str, float]] = field(default_factory=list)  # (group, score) of each answer
    num_done: int = 0  # number of records, including failed ones
    num_cut: int = 0
    num_refused: int = 0
    num_failed: int = 0
    usage: TokenUsage = field(default_factory=TokenUsage)
    seconds: float = 0.0
    fingerprints: set[str] = field(default_factory=set)

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
        self.groups.append((record.group, record.score))
        if record.fingerprint:
            self.fingerprints.add(record.fingerprint)

    @property
    def total(self) -> int:
        """Returns the number of answers that the run asks for."""
        return len(self.task.samples) * self.task.repeats

    @property
    def mean(self) -> float | None:
        """The running score, None before the first."""
        return sum(score for _, score in self.groups) / len(self.groups) if self.groups else None

    @property
    def interval(self) -> Estimate:
        return clustered(list(self.scores.values()))

    def to_json(self) -> dict[str, Any]:
        interval, usage = self.interval, self.usage
        return {
            "task": self.task.name, "effort": self.effort, "metric": self.task.metric,
            "samples": len(self.task.samples), "repeats": self.task.repeats, "scored": len(self.groups),
            "cut": self.num_cut, "refused": self.num_refused, "failed": self.num_failed,
            "score": self.mean, "low": interval.low, "high": interval.high,
            "missing": self.total - self.num_done, "seconds": round(self.seconds, 3),
            "input_tokens": usage.input, "cached_tokens": usage.cached,
            "output_tokens": usage.output, "reasoning_tokens": usage.reasoning,
            "fingerprints": sorted(self.fingerprints),
            "breakdowns": [[one.name, one.score, one.count] for one in self.task.breakdowns(self.groups)],
        }  # fmt: skip
