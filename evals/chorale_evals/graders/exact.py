"""``exact``: the answer is the target string, apart from markup, quotes, spaces and a final full stop."""

from __future__ import annotations

from chorale_evals.graders.text import bare, boxed, labelled, plain, tail
from chorale_evals.graders.verdict import Verdict


def grade(text: str, target: str | list[str], *, ignore_case: bool = False) -> Verdict:
    """Compares the whole answer, the content of a ``\\boxed``, or the line that a label marks as the answer.

    ``target``: one string, or several of which one must match. Upper and lower case differ by default.
    """

    def form(value: str) -> str:
        value = bare(plain(value))
        return value.casefold() if ignore_case else value

    targets = [target] if isinstance(target, str) else target
    wanted = {form(one) for one in targets}
    for candidate in _candidates(tail(text)):
        if form(candidate) in wanted or candidate.strip() in targets:
            return Verdict(True, candidate.strip()[:500], "equal to the target")
    read = next(iter(_candidates(tail(text))), "").strip()
    return Verdict(False, read[:500] or None, "differs from the target" if read else "the answer is empty")


def _candidates(text: str) -> list[str]:
    """Returns what the answer may be: a marked answer alone if there is one, else the whole text."""
    if not text.strip():
        return []
    whole = [text]
    if (inside := boxed(text)) is not None:
        return [inside, *whole]
    if (rest := labelled(text)) is not None:
        line = rest.partition("\n")[0]
        return [line, *whole]
    return whole
