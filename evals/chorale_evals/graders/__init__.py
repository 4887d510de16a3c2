"""Graders compare the text of an answer with a target.

No output of a model makes a grader raise, and its time is bounded.
"""

from __future__ import annotations

from typing import Any

import msgspec

from chorale_evals.task import Outcome


class Grader(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """A grader of ``file:``. Its fields are the options that a line may set."""

    def check(self, answer: Any) -> None:
        """Raises ``ValueError`` if ``answer`` is not a valid target, by default a non-empty string."""
        if not isinstance(answer, str) or not answer.strip():
            raise ValueError("the answer must be a string that is not empty")

    def grade(self, text: str, target: Any) -> Outcome:
        """Grades a model's text. ``target``: an answer that passed ``check``."""
        raise NotImplementedError


def verdict(right: bool, read: str | None, reason: str) -> Outcome:
    """Returns score 1 or 0. ``read``: the answer found in the text, or None. ``reason``: for the report."""
    return Outcome(float(right), read, {"reason": reason})
