"""Numbers in prose: finds them with their places, and reads their value exactly, as a fraction."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

_CURRENCY = re.compile(r"(?<=[A-Za-z])[$€£¥₹₩₽]|[$€£¥₹₩₽]")
_INTEGER = r"\s{0,2}\{\s{0,2}(-?\d{1,40})\s{0,2}\}"
_LATEX = [
    (re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|operatorname)\s{0,3}\{([^{}]{0,300})\}"), r" \1 "),
    (re.compile(r"\\[dt]frac\b"), r"\\frac"),
    (re.compile(rf"(?<=\d)\s{{0,2}}\\frac{_INTEGER}{_INTEGER}"), r" \1/\2 "),
    (re.compile(rf"\\frac{_INTEGER}{_INTEGER}"), r"\1/\2 "),
    (re.compile(r"\\frac\s{0,2}(\d)(\d)"), r"\1/\2 "),
    (re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!|\\;|\\:)(?=\d)"), ","),
    (re.compile(r"\\(?:left|right|displaystyle|,|;|!|:| )"), " "),
    (re.compile(r"\\([$%&#_])"), r"\1"),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])"), "×"),
    (re.compile(r"\\(?:approx|simeq)(?![A-Za-z])"), "≈"),
    (re.compile(r"\^\s{0,2}\{\s{0,2}(-?\d{1,4})\s{0,2}\}"), r"^\1"),
    (re.compile(r"\^\s{0,2}\{?\s{0,2}\\circ\s{0,2}\}?"), "° "),
    (re.compile(r"\\[()\[\]]"), " "),
    (re.compile(r"(?<=\d)\*\*(?=\d)"), "^"),
    (re.compile(r"\*\*|`|__"), ""),
]
_SPACES = " \u00a0\u2009\u202f"
_GROUPED = rf"\d{{1,3}}(?:[{_SPACES}]\d{{3}}){{1,12}}(?!\d)(?:[.,]\d{{1,400}})?(?!\d)"
_DIGITS = rf"(?:{_GROUPED}|\d{{1,400}}(?:[.,'_]\d{{1,400}}){{0,40}}|(?<![\w.])\.\d{{1,400}})"
_NUMBER = re.compile(
    rf"(?<![A-Za-z_\d^])(?P<first>{_DIGITS})"
    rf"(?:[eE](?P<exponent>[-+]?\d{{1,3}})(?![\w]))?"
    rf"(?:\^(?P<power>-?\d{{1,3}})(?!\w))?"
    rf"(?:\s{{0,2}}[x×*·]\s{{0,2}}10\^(?P<ten>-?\d{{1,3}})(?!\w))?"
    rf"(?:\s?/\s?(?P<below>\d{{1,400}})(?![\d.]|/\d)|[ -](?P<top>\d{{1,9}})/(?P<under>\d{{1,9}})(?![\d/]))?"
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_AFTER = re.compile(
    r"\s{0,2}(?P<percent>%|per\s?cent\b)|\s{1,2}(?P<scale>hundred|thousand|million|billion|trillion)\b"
    r"|(?P<k>[kK])(?![\w])",
    re.IGNORECASE,
)
# A factor without a value of its own, a variable, a root, a ratio: the number alone is not the quantity.
_FACTOR_AFTER = re.compile(
    r"\s?(?:√|π|∞|\\sqrt|\\pi|\\infty|sqrt\b|pi\b)|[xyznij](?![A-Za-z])|:\d|\s?\\frac|\s?\^|\(|/\d|_\{?\d|\s?\\%?mod"
    r"|\s(?:squared|cubed|factorial|choose|dozen|mod|base)\b"
)
_FACTOR_BEFORE = re.compile(
    r"(?:[A-Za-z]-|√|\\sqrt\s?\{?|sqrt\s?\(|π\s?/?|\\pi\s?|log_?\{?|\d:|\d/|[A-Za-z][\^_]\{?-?|\^\{?-?)\s?-?$"
)
_DENIED = re.compile(
    r"(?:\bneither|\bnor|\bover|\bunder|\bthan|\bleast|\bmost|\bbelow|\babove|\bbetween|\bfrom"
    r"|\bexcept|(?<![-=])[<>≤≥]|\bmod)\s{0,2}(?:equal to |exactly |the |just )?[-+]?\s?$",
    re.IGNORECASE,
)
_REJECTED = re.compile(
    r"(?:\bnot|n't|\bnever|\binstead of|\brather than|≠)\s{0,2}(?:equal to |exactly |the |just )?[-+]?\s?$",
    re.IGNORECASE,
)


_MINUS = re.compile(r"(?<![\d)] )(?<![\d)])\b(?:minus|negative) $", re.IGNORECASE)
_AND_PART = re.compile(r"\sand\s(?:a|one|1)[\s-](half|quarter|third)\b", re.IGNORECASE)
_PARTS = {"half": Fraction(1, 2), "quarter": Fraction(1, 4), "third": Fraction(1, 3)}


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a text. ``value``: None if it is part of something else (a ratio, 2π, "above 5").

    ``is_rejected``: "not 5".
    """

    value: Fraction | None
    start: int
    end: int
    is_percent: bool = False
    is_rejected: bool = False


def simplified(text: str) -> str:
    """Returns prose or LaTeX without markup and currency signs, with ``a/b`` and ``a^b``."""
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return _CURRENCY.sub(lambda m: " " if m.start() and text[m.start() - 1].isalpha() else "", text)


def numbers(text: str) -> Iterator[Number]:
    """Yields the numbers of a simplified text."""
    for found in _NUMBER.finditer(text):
        start, negative = _sign(text, found.start())
        value, end, percent = _value(found), found.end(), False
        if after := _AFTER.match(text, end):
            end, percent = after.end(), bool(after.group("percent"))
            exponent = 3 if after.group("k") else _SCALES.get((after.group("scale") or "").lower(), 0)
            value = None if value is None else value * 10**exponent
        if (part := _AND_PART.match(text, end)) and value is not None:
            end, value = part.end(), value + _PARTS[part.group(1).lower()]
        before = text[max(0, start - 24) : start]
        rejected = bool(_REJECTED.search(before))
        if (
            rejected
            or _FACTOR_AFTER.match(text, end)
            or _FACTOR_BEFORE.search(before)
            or _DENIED.search(before)
        ):
            value = None
        yield Number(-value if negative and value is not None else value, start, end, percent, rejected)


def _sign(text: str, start: int) -> tuple[int, bool]:
    """Returns where the number begins with its sign, and whether it is negative."""
    if found := _MINUS.search(text, max(0, start - 12), start):
        return found.start(), True
    place = start - 1
    spaced = place >= 0 and text[place] == " "
    place -= spaced
    if place < 0 or text[place] not in "-+":
        return start, False
    before = text[:place].rstrip(" ")[-1:] if spaced else text[max(0, place - 1) : place]
    is_sign = (
        before in ("=", "(", ":", "[", "{", "≈", "~")
        if spaced
        else not (before.isalnum() or before in tuple(")]}%°"))
    )
    if not spaced and before == "":
        is_sign = True
    return (place, text[place] == "-") if is_sign else (start, False)


def _value(found: re.Match[str]) -> Fraction | None:
    value = decimal(found.group("first"))
    if value is None:
        return None
    try:
        if found.group("exponent"):
            value *= Fraction(10) ** int(found.group("exponent"))
        if found.group("power"):
            value = _power(value, int(found.group("power")))
        if found.group("ten"):
            value *= Fraction(10) ** int(found.group("ten"))
        if found.group("below"):
            value /= int(found.group("below"))
        elif found.group("top"):
            top, under = int(found.group("top")), int(found.group("under"))
            value = value + Fraction(top, under) if value.denominator == 1 and top < under else None
    except (ZeroDivisionError, OverflowError):
        return None
    return value


def _power(base: Fraction, exponent: int) -> Fraction:
    if abs(base.numerator) > 10**6 or base.denominator > 10**6:
        raise OverflowError
    return base**exponent


def decimal(digits: str) -> Fraction | None:
    """Returns the value of digits with separators, None if they are not one number ("1,2,3", "1.2.3").

    A group of three digits after a comma is thousands; of another length, a decimal part.
    """
    digits = re.sub(rf"[{_SPACES}'_]", "", digits)
    if re.fullmatch(r"\d+|\d*\.\d+", digits):
        return Fraction(digits)
    thousands = r"[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d{2})+,\d{3}"
    if re.fullmatch(rf"(?:{thousands})(?:\.\d+)?", digits):
        return Fraction(digits.replace(",", ""))
    if re.fullmatch(r"\d+,\d+|[1-9]\d{0,2}(?:\.\d{3})+,\d+|[1-9]\d{0,2}(?:\.\d{3}){2,}", digits):
        return Fraction(digits.replace(".", "").replace(",", "."))
    return None
