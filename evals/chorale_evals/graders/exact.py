"""``exact``: the answer is the target string, apart from markup, quotes, spaces and a final full stop."""

from __future__ import annotations

from chorale_evals.graders import verdict
from chorale_evals.graders.text import bare, boxed, labelled, plain
from chorale_evals.task import Outcome


def grade(text: str, target: str | list[str], *, ignore_case: bool = False) -> Outcome:
    """Compares the whole answer, the content of a ``\\boxed``, or the line that a label marks as the answer.

    ``target``: one string, or several of which one must match. Upper and lower case differ by default.
    """

    def form(value: str) -> str:
        value = bare(plain(value))
        return value.casefold() if ignore_case else value

    targets = [target] if isinstance(target, str) else target
    wanted = {form(one) for one in targets}
    marked = boxed(text)
    if marked is None:
        marked = (labelled(text) or "").partition("\n")[0] or None
    candidates = [one.strip() for one in (marked, text) if one is not None and one.strip()]
    for candidate in candidates:
        if form(candidate) in wanted or candidate in targets:
            return verdict(True, candidate[:500], "equal to the target")
    if not candidates:
        return verdict(False, None, "the answer is empty")
    return verdict(False, candidates[0][:500], "differs from the target")
