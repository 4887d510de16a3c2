"""Numbers written as English words."""

from __future__ import annotations

import re

_SMALL = {
    word: value
    for value, word in enumerate(
        (
            *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
            *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
            *("eighteen", "nineteen"),
        )
    )
}
_TENS = {
    word: 10 * value
    for value, word in enumerate(
        ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"), 2
    )
}
_SCALES = {"thousand": 1000, "million": 10**6, "billion": 10**9}
_WORDS = {*_SMALL, *_TENS, *_SCALES, "hundred"}
_DENIED = {"not", "n't", "never", "than", "least", "most", "or", "between", "no"}
_PARTS = re.compile(
    r"(?:half|halves|quarter|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth)s?"
)
_CHANGED = {"point", "dozen", "percent", "squared", "cubed", "plus", "minus", "times", "pair", "score"}


def worded(text: str) -> int | None:
    """Returns the value of the only number in a text that is written in words, None if there is not one.

    "One" alone is a number only if the text is just this word, since it is a pronoun elsewhere.
    """
    words = re.findall(r"n't|[a-z]+", text[:2000].lower())
    runs: list[list[str]] = []
    previous = ""
    for word in words:
        if word in _WORDS:
            if previous in _WORDS or (previous == "and" and runs and runs[-1][-1] in ("hundred", "thousand")):
                runs[-1].append(word)
            else:
                runs.append([word])
        previous = word
    negative = bool(re.match(r"\W{0,3}(?:minus|negative)\s", text.lower()))
    words = words[1:] if negative else words
    if (_DENIED | _CHANGED) & set(words) or any(map(_PARTS.fullmatch, words)):
        return None
    if words != ["one"] and ["one"] in runs:
        return None
    value = _value(runs[0]) if len(runs) == 1 else None
    return -value if negative and value is not None else value


def _value(words: list[str]) -> int | None:
    total = part = 0
    last = 10**12
    for word in words:
        if word in _SCALES:
            if not part or _SCALES[word] >= last:
                return None
            last = _SCALES[word]
            total, part = total + part * last, 0
        elif word == "hundred":
            if not 0 < part < 10:
                return None
            part *= 100
        else:
            value = _SMALL.get(word, _TENS.get(word, 0))
            room = 100 if part >= 100 else 10
            if part % room and not (part % 100 >= 20 and part % 10 == 0 and 0 < value < 10):
                return None
            part += value
    return total + part
