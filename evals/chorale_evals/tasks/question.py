"""The parts that the tasks of this package share: one question, one final text, one grade."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TypeVar

from chorale_evals.task import BaseTask, Message, Outcome, Sample, Session, take

_T = TypeVar("_T")
GREEDY = MappingProxyType({"temperature": 0.0})
_LONG = 20_000  # characters above which a text is graded in a thread


class QuestionTask(BaseTask):
    """A task that asks once about a sample and grades the final text."""

    name = ""
    version = ""

    def __init__(
        self, samples: Sequence[Sample], *, limit: int | None, seed: int, data_revision: str
    ) -> None:
        self._samples = take(samples, limit, seed)
        self.data_revision = data_revision

    def samples(self) -> Sequence[Sample]:
        """Returns the samples in a fixed order."""
        return self._samples

    def messages(self, sample: Sample, repeat: int) -> list[Message]:
        """Returns the conversation to send."""
        raise NotImplementedError

    def grade(self, sample: Sample, repeat: int, text: str) -> Outcome:
        """Returns the outcome of the final text ``text``."""
        raise NotImplementedError

    async def run(self, sample: Sample, repeat: int, session: Session) -> Outcome:
        """Asks about one sample and grades the answer."""
        reply = await session.ask(self.messages(sample, repeat))
        outcome = await off_loop(reply.text, lambda text: self.grade(sample, repeat, text))
        if reply.finish_reason == "length":
            outcome.detail["reason"] = "the answer was cut at the token limit"
        return outcome


async def off_loop(text: str, grade: Callable[[str], _T]) -> _T:
    """Returns ``grade(text)``, computed in a thread if the text is long."""
    if len(text) < _LONG:
        return grade(text)
    return await asyncio.to_thread(grade, text)


def user(text: str) -> Message:
    """A message of the user."""
    return {"role": "user", "content": text}
