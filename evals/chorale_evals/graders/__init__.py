"""Graders: functions that compare the text of an answer with a target.

``table.GRADERS`` has all of them. Each module has ``grade(text, target) -> Outcome`` (``unit_test`` has an
asynchronous one). A grader never raises because of what the model wrote, and its time is bounded.
"""

from __future__ import annotations

from chorale_evals.task import Outcome


def verdict(right: bool, read: str | None, reason: str) -> Outcome:
    """``read``: the answer that was found in the text, or None. ``reason`` is for the report."""
    return Outcome(float(right), read, {"reason": reason})
