"""``regex``: the answer matches a regular expression, within a time limit."""

from __future__ import annotations

import regex  # type: ignore[import-untyped]

from chorale_evals.graders import verdict
from chorale_evals.graders.text import MAX_CHARS
from chorale_evals.task import Outcome

SECONDS = 1.0


def grade(text: str, target: str, *, whole: bool = False, ignore_case: bool = False) -> Outcome:
    """Searches the answer for the pattern. ``whole``: it has to match all of it but spaces at its ends."""
    pattern = compiled(target, ignore_case)
    text = text[-MAX_CHARS:].strip()
    try:
        found = (pattern.fullmatch if whole else pattern.search)(text, timeout=SECONDS)
    except TimeoutError:
        return verdict(False, None, f"the pattern needs more than {SECONDS:g} s for this answer")
    if found is None:
        return verdict(False, text[:500] or None, "no match")
    return verdict(True, found.group()[:500], "match")


def compiled(pattern: str, ignore_case: bool = False) -> regex.Pattern[str]:
    """Raises ``ValueError`` for an invalid pattern."""
    try:
        return regex.compile(pattern, regex.IGNORECASE if ignore_case else 0)
    except regex.error as error:
        raise ValueError(f"invalid pattern: {error}") from None
