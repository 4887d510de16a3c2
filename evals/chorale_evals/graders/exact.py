"""``exact``: the answer is the target string, apart from markup, quotes, spaces and a final full stop."""

from __future__ import annotations

from typing import Any

from chorale_evals.graders import Grader, verdict
from chorale_evals.graders.text import bare, boxed, labelled, plain
from chorale_evals.task import Outcome


class Exact(Grader, frozen=True, tag="exact"):
    """Compares the whole answer, the content of a ``\\boxed``, or the line that a label marks as the answer.

    The target is one string, or several of which one must match. Upper and lower case differ by default.
    """

    ignore_case: bool = False

    def check(self, answer: Any) -> None:
        for one in answer if isinstance(answer, list) and answer else [answer]:
            super().check(one)

    def grade(self, text: str, target: str | list[str]) -> Outcome:
        targets = [target] if isinstance(target, str) else target
        wanted = {self._form(one) for one in targets}
        marked = boxed(text) or (labelled(text) or "").partition("\n")[0]
        candidates = [one.strip() for one in (marked, text) if one.strip()]
        for candidate in candidates:
            if self._form(candidate) in wanted or candidate in targets:
                return verdict(True, candidate[:500], "equal to the target")
        if not candidates:
            return verdict(False, None, "the answer is empty")
        return verdict(False, candidates[0][:500], "differs from the target")

    def _form(self, value: str) -> str:
        value = bare(plain(value))
        return value.casefold() if self.ignore_case else value
