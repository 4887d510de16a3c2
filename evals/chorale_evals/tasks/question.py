"""The parts that the published tasks share: one question, one final text, one grade."""

from __future__ import annotations

import asyncio

from chorale_evals.task import Message, Outcome, Sample, Session, Task

_LONG = 20_000  # characters above which a text is graded in a thread


class QuestionTask(Task):
    """A task that asks once about a sample and grades the final text."""

    def prompt(self, sample: Sample, repeat: int) -> str:
        """Returns the message of the user."""
        raise NotImplementedError

    def grade(self, sample: Sample, repeat: int, text: str) -> Outcome:
        """Returns the outcome of the final text."""
        raise NotImplementedError

    async def run(self, sample: Sample, repeat: int, session: Session) -> Outcome:
        message: Message = {"role": "user", "content": self.prompt(sample, repeat)}
        reply = await session.ask([message])
        if len(reply.text) < _LONG:
            outcome = self.grade(sample, repeat, reply.text)
        else:
            outcome = await asyncio.to_thread(self.grade, sample, repeat, reply.text)
        if reply.finish_reason == "length":
            outcome.detail["reason"] = "the answer was cut at the token limit"
        return outcome
