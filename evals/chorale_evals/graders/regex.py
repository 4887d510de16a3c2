"""Regular expressions of published tasks, and ``regex``: the answer matches one of an operator.

Some published patterns take quadratic time or worse on texts that a looping model writes, such as a hundred
thousand line ends. A search therefore ends after ``SECONDS``, which counts as "no match", and it releases the
interpreter lock. On all other texts the results equal those of the module ``re``.
"""

from __future__ import annotations

import re
from typing import Any

import regex  # type: ignore[import-untyped]  # comes with tiktoken

from chorale_evals.graders import Grader, verdict
from chorale_evals.graders.text import MAX_CHARS
from chorale_evals.task import Outcome

SECONDS = 1.0


def compiled(pattern: str, flags: int = 0) -> Any:
    """Compiles a pattern that was written for ``re``. Raises ``ValueError`` for an invalid one."""
    try:
        return regex.compile(pattern, flags | regex.VERSION0)
    except regex.error as error:
        raise ValueError(f"invalid pattern: {error}") from None


def first(pattern: Any, text: str) -> Any | None:
    """Returns the first match, or None."""
    try:
        return pattern.search(text, timeout=SECONDS, concurrent=True)
    except TimeoutError:
        return None


def everything(pattern: Any, text: str) -> list[Any]:
    """Returns all matches, in the form of ``re.findall``."""
    try:
        found: list[Any] = pattern.findall(text, timeout=SECONDS, concurrent=True)
        return found
    except TimeoutError:
        return []


class Regex(Grader, frozen=True, tag="regex"):
    """Searches the answer for the target. ``whole``: it must match all of it but spaces at its ends."""

    whole: bool = False
    ignore_case: bool = False

    def check(self, answer: Any) -> None:
        super().check(answer)
        self._compiled(answer)

    def grade(self, text: str, target: str) -> Outcome:
        pattern, text = self._compiled(target), text[-MAX_CHARS:].strip()
        try:
            found = (pattern.fullmatch if self.whole else pattern.search)(text, timeout=SECONDS)
        except TimeoutError:
            return verdict(False, None, f"the pattern needs more than {SECONDS:g} s for this answer")
        if found is None:
            return verdict(False, text[:500] or None, "no match")
        return verdict(True, found.group()[:500], "match")

    def _compiled(self, target: str) -> Any:
        return compiled(target, re.IGNORECASE if self.ignore_case else 0)
