"""The result of a grader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chorale_evals.task import Outcome


@dataclass(frozen=True, slots=True)
class Verdict:
    """``read``: the answer that was found in the text, or None. ``reason`` is for the report."""

    right: bool
    read: str | None
    reason: str
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        return Outcome(float(self.right), self.read, {"reason": self.reason, **self.detail})
