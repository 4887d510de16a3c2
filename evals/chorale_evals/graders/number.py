"""``number``: the answer is a number equal to the target, however it is written."""

from __future__ import annotations

import itertools
import re
from decimal import Decimal
from fractions import Fraction

from chorale_evals.graders.numerals import Number, numbers, simplified
from chorale_evals.graders.text import boxed, labelled, plain, tail
from chorale_evals.graders.verdict import Verdict
from chorale_evals.graders.words import worded

_MAX_LINES, _MAX_SENTENCE = 400, 2000  # what is read of a long answer
Target = int | float | str
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n")
_EQUALS = re.compile(r"=|≈|≅|\bequals\b|\bis equal to\b")
_OPERATOR = re.compile(
    r"\s{0,3}(?:[-+×*·÷^]|plus\b|minus\b|times\b|divided by\b)\s{0,3}\(?\s{0,2}-?$", re.IGNORECASE
)
_OPERATES = re.compile(r"\s{0,3}(?:[+×*·÷^]|-\s|-\d|/|plus\b|minus\b|times\b)")
_CONTINUES = re.compile(rf"{_OPERATES.pattern}|\s{{0,3}}[=≈≅]")
_PARENTHESES = re.compile(r"\((?!\s?or\b)[^()]{0,200}\)")
_ALTERNATIVE = re.compile(
    r"\s{0,2}(?:%|°)?\s{0,2}\(?(?:,?\s?(?:or|and|to|through|between)|,|-|/|±|vs\.?|versus)\s{0,2}"
    r"(?:maybe |perhaps |possibly |even |about |with )?$",
    re.IGNORECASE,
)
_BOLD = re.compile(r"\*\*([^*\n]{1,80})\*\*")


def value_of(target: Target) -> Fraction:
    """Returns the value of a target. Raises ``ValueError`` if it is not one number."""
    if isinstance(target, bool):
        raise ValueError("the answer is not a number")
    if isinstance(target, (int, float)):
        if target != target or target in (float("inf"), float("-inf")):
            raise ValueError("the answer is not a finite number")
        return Fraction(Decimal(str(target)))
    found = list(numbers(simplified(plain(target))))
    if len(found) != 1 or found[0].value is None:
        raise ValueError(f"the answer {target!r} is not one number")
    return found[0].value / (100 if found[0].is_percent else 1)


def grade(text: str, target: Target, *, tolerance: float = 0.0, relative: float = 0.0) -> Verdict:
    """Compares exactly, or within ``tolerance`` or ``relative`` (a share of the target)."""
    wanted = value_of(target)
    found = read(text)
    if found is None or found.value is None:
        return Verdict(False, None, "no number that stands as the answer")
    allowed = max(Fraction(Decimal(str(tolerance))), abs(wanted) * Fraction(Decimal(str(relative))))
    right = any(abs(value - wanted) <= allowed for value in _values(found, target, wanted))
    return Verdict(right, _shown(found), f"{'equals' if right else 'differs from'} {target}")


def _values(found: Number, target: Target, wanted: Fraction) -> list[Fraction]:
    """Returns the value. Of a percentage the share too, or alone if the target is not given in per cent."""
    assert found.value is not None
    if isinstance(target, str) and "%" in plain(target):
        return [found.value / 100] if found.is_percent else [found.value, found.value / 100]
    if not found.is_percent:
        return [found.value]
    return [found.value / 100] if wanted.denominator != 1 and abs(wanted) < 1 else [found.value]


def _shown(found: Number) -> str:
    value = found.value
    assert value is not None
    text = str(value)
    if value.denominator != 1 and len(text) < 40 and Fraction(str(float(value))) == value:
        text = str(float(value))
    return text[:80] + ("%" if found.is_percent else "")


def read(text: str) -> Number | None:
    """Returns the number that an answer gives: boxed, after a label, alone in bold, else the last one."""
    text = plain(tail(text))
    if (inside := boxed(text)) is not None and (found := _in_sentence(simplified(inside), labelled=True)):
        return found
    if (rest := labelled(text)) is not None:
        for sentence in _SENTENCE.split(simplified(rest))[:4]:
            if found := _in_sentence(sentence, labelled=True):
                return found
    return _unlabelled(text)


def _unlabelled(text: str) -> Number | None:
    lines = [line for line in text.splitlines() if line.strip()]
    for line in reversed(lines[-_MAX_LINES:]):
        for bold in reversed(_BOLD.findall(line)):
            alone = list(numbers(simplified(bold)))
            if len(alone) == 1 and alone[0].value is not None and not bold.rstrip().endswith(":"):
                return alone[0]
        for sentence in reversed(_SENTENCE.split(simplified(line))):
            if found := _in_sentence(sentence, labelled=False):
                return found
    return None


def _in_sentence(sentence: str, *, labelled: bool) -> Number | None:
    """Returns the number that a sentence gives, None if it has none; its value is None if it is not definite.

    After a label, that is the first number, as what comes next explains it. Otherwise, it is the result of an
    equation, else the last number outside parentheses.
    """
    sentence = sentence[:_MAX_SENTENCE] if labelled else sentence[-_MAX_SENTENCE:]
    found = list(numbers(sentence))
    if not found:
        value = worded(sentence)
        return None if value is None else Number(Fraction(value), 0, len(sentence))
    found = [one for one in found if not one.is_rejected] or found
    if labelled and _is_first(sentence, found[0]) and not _continues(sentence[found[0].end :]):
        return _definite(sentence, found, 0)
    outside = _PARENTHESES.sub(lambda inside: " " * len(inside.group()), sentence)
    found = [one for one in found if outside[one.start : one.end].strip()] or found
    return _result(sentence, found) or _definite(sentence, found, len(found) - 1)


def _result(sentence: str, found: list[Number]) -> Number | None:
    """Returns the number that is one side of an equation, the last side that is not an expression."""
    bounds = [0, *(mark.end() for mark in _EQUALS.finditer(sentence)), len(sentence) + 1]
    for low, high in reversed(list(itertools.pairwise(bounds))) if len(bounds) > 2 else ():
        side = [one for one in found if low <= one.start and one.end <= high]
        joined = [_continues(sentence[one.end : high], equals=False) for one in side]
        if len(side) == 1 and not joined[0]:
            return side[0]
        if not side or not all(joined[:-1]):
            return None
    return None


def _continues(after: str, *, equals: bool = True) -> bool:
    """Returns whether an operator, or "=", follows a number."""
    return bool((_CONTINUES if equals else _OPERATES).match(after))


def _is_first(sentence: str, number: Number) -> bool:
    """Returns whether no more than a few words come before a number ("approximately", "x =")."""
    return len(sentence[: number.start].split()) <= 3


def _definite(sentence: str, found: list[Number], index: int) -> Number:
    """Returns a number without its value if it is one of two alternatives or an operand."""
    one = found[index]
    before = sentence[found[index - 1].end : one.start] if index else ""
    after = sentence[one.end : found[index + 1].start] if index + 1 < len(found) else ""
    for between in (before, after):
        if between and (_OPERATOR.fullmatch(between) or _ALTERNATIVE.fullmatch(between)):
            return Number(None, one.start, one.end)
    return one
