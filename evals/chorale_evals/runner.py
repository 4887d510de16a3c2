"""Runs the jobs of a plan against a server, a bounded number at a time, and journals each answer."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chorale.errors import ConfigError
from chorale.requests.openai_client import AsyncClient
from chorale_evals.errors import RefusedError, ServerLostError, UnansweredError
from chorale_evals.journal import Journal
from chorale_evals.record import Key, Record, Status
from chorale_evals.session import Session
from chorale_evals.task import Outcome, Sample, Task
from chorale_evals.wire import WIRES, Api

logger = logging.getLogger(__name__)
_FEWEST_LOST = 8  # failures in a row before the server counts as lost


@dataclass(frozen=True, slots=True)
class Part:
    """A task at all efforts of a run."""

    task: Task
    repeats: int


@dataclass(frozen=True, slots=True)
class Job:
    part: Part
    effort: str
    sample: Sample
    repeat: int

    @property
    def key(self) -> Key:
        return Key(self.part.task.name, self.effort, self.sample.id, self.repeat)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything to ask. ``fields`` override those of the tasks; ``seed`` gives each request its own seed."""

    parts: Sequence[Part]
    efforts: Sequence[str]
    model: str
    api: Api = "chat"
    fields: Mapping[str, Any] | None = None
    seed: int | None = None
    concurrency: int = 64

    def jobs(self) -> Iterator[Job]:
        """Yields jobs in the order of their start: the first repeat of every sample before the second."""
        for part in self.parts:
            for effort in self.efforts:
                for repeat in range(part.repeats):
                    for sample in part.task.samples:
                        yield Job(part, effort, sample, repeat)

    def fields_of(self, job: Job) -> dict[str, Any]:
        fields = {"temperature": 1.0} | dict(job.part.task.defaults) | dict(self.fields or {})
        if job.effort != "default":
            fields["reasoning_effort"] = job.effort
        if self.seed is not None:
            fields["seed"] = zlib.crc32(repr((self.seed, *job.key)).encode("utf-8", "surrogatepass")) >> 1
        return fields


class Runner:
    """Runs a plan once. ``on_record`` is called after each journalled answer."""

    def __init__(
        self, plan: Plan, client: AsyncClient, journal: Journal, on_record: Callable[[Record], None]
    ) -> None:
        self._plan, self._client, self._journal, self._on_record = plan, client, journal, on_record
        self._num_answered = 0
        self._in_a_row = 0  # failures or refusals since the last answer

    async def run(self, done: Collection[Key]) -> None:
        """Runs all jobs but those in ``done``.

        Raises ``ServerLostError`` if the server stops answering, and ``ConfigError`` if no request can
        succeed. What was answered until then is in the journal.
        """
        jobs = (job for job in self._plan.jobs() if job.key not in done)
        workers = [asyncio.create_task(self._work(jobs)) for _ in range(self._plan.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, jobs: Iterator[Job]) -> None:
        for job in jobs:
            record = await self._record(job)
            self._journal.append(record)
            self._on_record(record)
            self._watch(record)

    async def _record(self, job: Job) -> Record:
        plan, task = self._plan, job.part.task
        session = Session(self._client, WIRES[plan.api], plan.model, plan.fields_of(job))
        status: Status = "answered"
        try:
            outcome = await task.run(job.sample, job.repeat, session)
        except ConfigError:
            raise
        except RefusedError as error:
            status, outcome = "refused", Outcome(0.0, None, {"error": error.message})
        except UnansweredError as error:
            status, outcome = "failed", Outcome(0.0, None, {"error": error.message})
        except Exception as error:  # a bug of the task: the other samples continue
            logger.warning("%s, sample %s: the task failed", task.name, job.sample.id, exc_info=True)
            status, outcome = "failed", Outcome(0.0, None, {"error": f"{type(error).__name__}: {error}"})
        return Record(
            *job.key, status, outcome.score, outcome.answer, outcome.detail,
            finish=session.finish_reason, usage=session.usage, seconds=round(session.seconds, 3),
            fingerprint=session.fingerprint, group=job.sample.group, question=job.sample.question,
            target=job.sample.target, exchanges=session.exchanges,
        )  # fmt: skip

    def _watch(self, record: Record) -> None:
        """Raises ``ServerLostError`` if too many requests in a row got no answer."""
        if record.status == "answered":
            self._num_answered, self._in_a_row = self._num_answered + 1, 0
            return
        if record.status == "refused" and self._num_answered:
            return
        self._in_a_row += 1
        if self._in_a_row >= max(_FEWEST_LOST, self._plan.concurrency):
            raise ServerLostError(
                f"{self._in_a_row} requests in a row got no answer; the last: {record.detail.get('error')}"
            )
