"""One line of the journal: a graded answer, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from chorale.requests.usage import TokenUsage

Status = Literal["answered", "refused", "failed"]


class Key(NamedTuple):
    """Identifies a line. A later line of the same key replaces an earlier one."""

    task: str
    effort: str
    sample: str
    repeat: int


@dataclass(frozen=True, slots=True)
class Record:
    """One trial. A resumed run asks again if ``status`` is "refused" (score 0) or "failed" (no score).

    ``finish``: finish reason of the last reply. ``seconds``: time spent waiting for the server.
    """

    task: str
    effort: str
    sample: str
    repeat: int
    status: Status
    score: float
    answer: str | None
    detail: dict[str, Any] = field(default_factory=dict)
    finish: str = ""
    usage: TokenUsage = field(default_factory=TokenUsage)
    seconds: float = 0.0
    fingerprint: str = ""
    group: str = ""
    question: Any = None
    target: Any = None
    exchanges: list[dict[str, Any]] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return Key(self.task, self.effort, self.sample, self.repeat)

    def light(self) -> Record:
        """Returns the record without the question and the exchanges."""
        return replace(self, question=None, target=None, exchanges=[])
