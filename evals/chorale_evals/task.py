"""The contract between a task, which knows data and grading, and the runner, which talks to a server.

The runner owns concurrency, retries of transport errors, the journal and resuming; a task never sees these.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from chorale_evals.session import Session
from chorale_evals.wire import Message


@dataclass(frozen=True, slots=True)
class Sample:
    """One question. ``id`` is the same in every run: from the data, else a hash of the question.

    ``question`` and ``target`` are JSON, shown in the report. ``group`` (a subject) is for breakdowns.
    """

    id: str
    question: Any
    target: Any
    group: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A graded answer. ``score`` is from 0 to 1. ``answer``: as the grader found it in the text, or None.

    ``detail`` is JSON for the report: the grader's reason, results per constraint.
    """

    score: float
    answer: str | None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A row below the main table: the mean score of one group."""

    name: str
    score: float
    count: int


class Task:
    """A set of questions and how to grade the answers. Made by a factory in ``tasks/`` (see its table).

    ``version`` changes when prompts or graders change; ``data_revision`` is the hash of the data. A journal
    is resumed only if both are equal. ``metric``: name of the score. ``notes``: differences from the
    published harness, for the report. ``defaults``: request fields as in the published harness, such as
    ``{"temperature": 0.0}``; the command line overrides them.
    """

    name = ""
    version = ""
    repeats = 1  # answers to each sample
    metric = "accuracy"
    notes = ""
    defaults: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, samples: Sequence[Sample], limit: int | None, seed: int, data_revision: str) -> None:
        self.samples = take(samples, limit, seed)
        self.data_revision = data_revision

    def messages(self, sample: Sample, repeat: int) -> list[Message]:
        """Returns the conversation to send. ``repeat`` counts from 0."""
        raise NotImplementedError

    def fields(self, sample: Sample) -> dict[str, Any]:
        """Returns the request fields that a sample sets, in Chat Completions format."""
        return {}

    def grade(self, sample: Sample, repeat: int, text: str) -> Outcome:
        """Returns the outcome of the final text. Runs in a thread, because a text may be long."""
        raise NotImplementedError

    async def run(self, sample: Sample, repeat: int, session: Session) -> Outcome:
        """Asks about one sample and grades the answer.

        Raises ``UnansweredError`` or ``RefusedError``.
        """
        reply = await session.ask(self.messages(sample, repeat), **self.fields(sample))
        outcome = await asyncio.to_thread(self.grade, sample, repeat, reply.graded)
        if reply.finish_reason == "length":
            outcome.detail.setdefault("reason", "the answer was cut at the token limit")
        return outcome

    def breakdowns(self, scores: Sequence[tuple[str, float]]) -> list[Breakdown]:
        """Returns the mean score of each group, if the samples have more than one.

        ``scores``: (group, score) of each answer.
        """
        found = by_group(scores)
        return found if len(found) > 1 else []


def by_group(scores: Sequence[tuple[str, float]]) -> list[Breakdown]:
    """Returns the mean score by name."""
    groups: dict[str, list[float]] = {}
    for name, score in scores:
        groups.setdefault(name, []).append(score)
    return [Breakdown(name, sum(each) / len(each), len(each)) for name, each in sorted(groups.items())]


def take(samples: Sequence[Sample], limit: int | None, seed: int = 0) -> list[Sample]:
    """Returns all samples in their order, or ``limit`` of them in a random order that depends on ``seed``.

    A smaller limit takes a subset of a larger one, so a run can be extended.
    """
    if limit is None or limit >= len(samples):
        return list(samples)
    mixed = list(samples)
    random.Random(seed).shuffle(mixed)
    return mixed[:limit]
