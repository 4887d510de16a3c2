"""The contract between a task, which knows data and grading, and the runner, which talks to a server.

A task asks through a ``Session`` and returns an ``Outcome``. The runner owns concurrency, retries of
transport errors, the journal and resuming; a task never sees these.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

from chorale.requests.usage import TokenUsage

Effort = Literal["low", "medium", "high"]
EFFORTS: tuple[Effort, ...] = ("low", "medium", "high")
Message = dict[str, Any]  # in the form of Chat Completions


@dataclass(frozen=True, slots=True)
class Sample:
    """One question. ``id`` is stable over runs: from the data, else a hash of the question.

    ``question`` and ``target`` are JSON, shown in the report. ``group`` (a subject) is for breakdowns.
    """

    id: str
    question: Any
    target: Any
    group: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A graded answer. ``score`` is from 0 to 1. ``answer`` is what the grader read in the text, or None.

    ``detail`` is JSON for the report: the grader's reason, results per constraint.
    """

    score: float
    answer: str | None
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call of the model. ``arguments`` is a string as the server sent it, perhaps invalid JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model.

    ``finish_reason``: "stop", "length", "tool_calls" or "content_filter". ``text`` is "" if there is none.
    """

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    usage: TokenUsage = field(default_factory=TokenUsage)


class Session(Protocol):
    """The requests of one sample. Each goes into the journal with its reply."""

    async def ask(self, messages: Sequence[Message], **fields: Any) -> Reply:
        """Sends the conversation and returns the answer.

        ``messages`` and ``fields`` are in the form of Chat Completions; with ``--api responses`` the session
        converts them. ``fields`` override the run's settings (``max_tokens=16``) or add to them.

        Raises ``AskError`` if no answer arrives after all retries, or the server refuses the request. A task
        lets it pass: the runner records the sample as failed and continues.
        """
        ...


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A further row of the table: the score of a group."""

    name: str
    score: float
    count: int


class Task:
    """A set of questions and how to grade the answers. Made by a factory in ``tasks/`` (see its table).

    ``version`` changes when prompts or graders change: a journal of another version is not resumed, nor one
    of another ``data_revision``, the hash of the data. ``metric``: name of the score. ``notes``: differences
    from the published harness, for the report. ``defaults``: fields that the published harness sends
    (``{"temperature": 0.0}``), unless the command line sets them.
    """

    name = ""
    version = ""
    default_repeats = 1
    metric = "accuracy"
    notes = ""
    defaults: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, samples: Sequence[Sample], limit: int | None, seed: int, data_revision: str) -> None:
        self.samples = take(samples, limit, seed)
        self.data_revision = data_revision

    async def run(self, sample: Sample, repeat: int, session: Session) -> Outcome:
        """Asks about one sample and grades the answer. ``repeat`` counts from 0."""
        raise NotImplementedError

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
