"""``regex``: the answer matches a regular expression, within a time limit."""

from __future__ import annotations

import re
from typing import Any

from chorale_evals.graders import Grader, check_string, patterns, verdict
from chorale_evals.graders.text import MAX_CHARS
from chorale_evals.task import Outcome


class Regex(Grader, frozen=True, tag="regex"):
    """Searches the answer for the target. ``whole``: it must match all of it but spaces at its ends."""

    whole: bool = False
    ignore_case: bool = False

    def check(self, answer: Any) -> None:
        check_string(answer)
        self._compiled(answer)

    def grade(self, text: str, target: str) -> Outcome:
        pattern, text = self._compiled(target), text[-MAX_CHARS:].strip()
        try:
            found = (pattern.fullmatch if self.whole else pattern.search)(text, timeout=patterns.SECONDS)
        except TimeoutError:
            return verdict(False, None, f"the pattern needs more than {patterns.SECONDS:g} s for this answer")
        if found is None:
            return verdict(False, text[:500] or None, "no match")
        return verdict(True, found.group()[:500], "match")

    def _compiled(self, target: str) -> Any:
        return patterns.compiled(target, re.IGNORECASE if self.ignore_case else 0)
