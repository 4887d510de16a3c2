"""``number``: the answer is a number equal to the target."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any

import msgspec

from chorale_evals.graders import Grader, verdict
from chorale_evals.graders.text import boxed, labelled, plain
from chorale_evals.task import Outcome

Target = int | float | str
_LATEX = [
    (
        re.compile(r"\\[dt]?frac\s{0,2}\{\s{0,2}(-?\d{1,40})\s{0,2}\}\s{0,2}\{\s{0,2}(\d{1,40})\s{0,2}\}"),
        r" \1/\2 ",
    ),
    (re.compile(r"(?<=\d)(?:\{,\}|\\[,!;:])(?=\d)"), ","),
    (re.compile(r"\\?[$€£]"), ""),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"(?<=[-+])\s(?=\d)"), ""),
]
_DIGITS = r"(?:\d{1,3}(?:[, ]\d{3}){1,12}(?!\d)|\d{1,400})(?:\.\d{1,400})?|\.\d{1,400}"
# Words before and after a number that change its value, as in "at least 5" and "5 million".
_NOT = "".join(rf"(?<!{word} )" for word in ("not", "n't", "than", "least", "most", "between", "over"))
_PART = (
    r"\s?(?:million|billion|thousand|hundred|dozen|squared"
    r"|[kix]\b|[π√≤³²]|\^(?!\{?\\circ)|\\pi|\\sqrt|:\d|[-–]\d|or\s\d)"
)
# A sign that follows a number is an operator.
_NUMBER = re.compile(
    rf"{_NOT}(?<![\w.^√])(?:(?<![\d)])(?P<sign>[-+]))?(?P<digits>{_DIGITS})"
    rf"(?:[eE](?P<exponent>[-+]?\d{{1,3}})(?!\w))?"
    rf"(?:/(?P<below>\d{{1,400}}))?(?!{_PART})(?P<percent>\s{{0,2}}%)?"
)
_PARENTHESES = re.compile(r"(?<=\d )\([^()]{0,200}\)")
_BOLD = re.compile(r"\*\*([^*\n]{1,80})\*\*")
_REASON = re.compile(r"[,;(]\s|\b(?:because|since|as)\b")


def value_of(target: Target) -> Fraction:
    """Returns the value of a target. Raises ``ValueError`` if it is not one number."""
    if isinstance(target, bool) or (isinstance(target, float) and not math.isfinite(target)):
        raise ValueError(f"the answer {target!r} is not a finite number")
    if isinstance(target, (int, float)):
        return Fraction(Decimal(str(target)))
    found = _numbers(target)
    if len(found) != 1:
        raise ValueError(f"the answer {target!r} is not one number")
    return found[0][0] / (100 if found[0][1] else 1)


class Number(Grader, frozen=True, tag="number"):
    """Compares exactly, or within ``tolerance`` or ``relative`` (a fraction of the target)."""

    tolerance: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    relative: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def check(self, answer: Any) -> None:
        if not isinstance(answer, (int, float, str)):
            raise ValueError("the answer must be a number")
        value_of(answer)

    def grade(self, text: str, target: Target) -> Outcome:
        wanted = value_of(target)
        found = read(text)
        if found is None:
            return verdict(False, None, "no number")
        value, is_percent = found
        shown = f"{value}%" if is_percent else str(value)
        # A percentage counts as a fraction if the target is a percentage or a fraction below 1.
        is_share = (isinstance(target, str) and "%" in target) or (
            wanted.denominator != 1 and abs(wanted) < 1
        )
        value = value / 100 if is_percent and is_share else value
        relative = abs(wanted) * Fraction(Decimal(str(self.relative)))
        right = abs(value - wanted) <= max(Fraction(Decimal(str(self.tolerance))), relative)
        return verdict(right, shown[:80], f"{'equals' if right else 'differs from'} {target}")


def read(text: str) -> tuple[Fraction, bool] | None:
    """Returns the number of an answer and whether it is a percentage.

    The number is in a box, else after a label, else alone in bold, else the last one in the text.
    """
    text = plain(text)
    if (inside := boxed(text)) is not None and (found := _numbers(inside)):
        return found[-1]
    if (rest := labelled(text)) is not None:
        # The text gives the answer, then its reason. The answer of an equation is its right side.
        head = _REASON.split(rest.partition("\n")[0], maxsplit=1)[0]
        if found := _numbers(head.rpartition("=")[2]):
            return found[0]
    for bold in reversed(_BOLD.findall(text[-2000:])):
        if len(found := _numbers(bold)) == 1 and not bold.endswith(":"):
            return found[0]
    found = _numbers(_PARENTHESES.sub("", text[-2000:]))
    return found[-1] if found else None


def _numbers(text: str) -> list[tuple[Fraction, bool]]:
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    found = []
    for one in _NUMBER.finditer(text):
        below = int(one["below"] or 1)
        if below:
            digits, power = re.sub("[, ]", "", one["digits"]), int(one["exponent"] or 0)
            value = Fraction(digits) * Fraction(10) ** power / below
            found.append((-value if one["sign"] == "-" else value, bool(one["percent"])))
    return found
