"""Runs the trials of a plan against a server, a bounded number at a time, and journals each answer."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chorale.errors import ChoraleError, ConfigError
from chorale.requests.openai_client import AsyncClient
from chorale_evals.journal import Journal
from chorale_evals.record import Key, Record, Status
from chorale_evals.session import RefusedError, Session, UnansweredError
from chorale_evals.task import Outcome, Sample, Task
from chorale_evals.wire import WIRES, Api

logger = logging.getLogger(__name__)
_FEWEST_LOST = 8  # fewest failures in a row after which the server counts as lost


@dataclass(frozen=True, slots=True)
class Trial:
    task: Task
    effort: str
    sample: Sample
    repeat: int

    @property
    def key(self) -> Key:
        return Key(self.task.name, self.effort, self.sample.id, self.repeat)


@dataclass(frozen=True, slots=True)
class Plan:
    """The trials of a run. ``fields`` override the tasks' fields; ``seed`` determines each request's seed."""

    tasks: Sequence[Task]
    efforts: Sequence[str]
    model: str
    api: Api = "chat"
    fields: Mapping[str, Any] | None = None
    seed: int | None = None
    concurrency: int = 64

    def trials(self) -> Iterator[Trial]:
        """Yields trials in the order of their start: the first repeat of every sample before the second."""
        for task in self.tasks:
            for effort in self.efforts:
                for repeat in range(task.repeats):
                    for sample in task.samples:
                        yield Trial(task, effort, sample, repeat)

    def fields_of(self, trial: Trial) -> dict[str, Any]:
        fields = {"temperature": 1.0} | dict(trial.task.defaults) | dict(self.fields or {})
        if trial.effort != "default":
            fields["reasoning_effort"] = trial.effort
        if self.seed is not None:
            fields["seed"] = zlib.crc32(repr((self.seed, *trial.key)).encode("utf-8", "surrogatepass")) >> 1
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
        """Runs all trials except those in ``done``.

        Raises ``ChoraleError`` if the server stops answering, and ``ConfigError`` if no request can
        succeed. Earlier answers are in the journal.
        """
        trials = (trial for trial in self._plan.trials() if trial.key not in done)
        workers = [asyncio.create_task(self._work(trials)) for _ in range(self._plan.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, trials: Iterator[Trial]) -> None:
        for trial in trials:
            record = await self._record(trial)
            self._journal.append(record)
            self._on_record(record)
            self._watch(record)

    async def _record(self, trial: Trial) -> Record:
        plan, task = self._plan, trial.task
        session = Session(self._client, WIRES[plan.api], plan.model, plan.fields_of(trial))
        status: Status = "answered"
        try:
            outcome = await task.run(trial.sample, trial.repeat, session)
        except ConfigError:
            raise
        except RefusedError as error:
            status, outcome = "refused", Outcome(0.0, None, {"error": error.message})
        except UnansweredError as error:
            status, outcome = "failed", Outcome(0.0, None, {"error": error.message})
        except Exception as error:  # a bug in the task: the other samples continue
            logger.warning("%s, sample %s: the task failed", task.name, trial.sample.id, exc_info=True)
            status, outcome = "failed", Outcome(0.0, None, {"error": f"{type(error).__name__}: {error}"})
        return Record(
            *trial.key, status, outcome.score, outcome.answer, outcome.detail,
            finish=session.finish_reason, usage=session.usage, seconds=round(session.seconds, 3),
            fingerprint=session.fingerprint, group=trial.sample.group, question=trial.sample.question,
            target=trial.sample.target, exchanges=session.exchanges,
        )  # fmt: skip

    def _watch(self, record: Record) -> None:
        """Raises ``ChoraleError`` if too many requests in a row got no answer."""
        if record.status == "answered":
            self._num_answered, self._in_a_row = self._num_answered + 1, 0
            return
        if record.status == "refused" and self._num_answered:
            return
        self._in_a_row += 1
        if self._in_a_row >= max(_FEWEST_LOST, self._plan.concurrency):
            raise ChoraleError(
                f"{self._in_a_row} requests in a row got no answer; the last: {record.detail.get('error')}"
            )
