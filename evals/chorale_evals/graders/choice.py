"""``choice``: the answer is the letter of one choice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from chorale_evals.graders import Grader, verdict
from chorale_evals.graders.text import bare, boxed, labelled, plain
from chorale_evals.task import Outcome

LETTERS = "ABCDEFGHIJ"
_HEAD = re.compile(
    r"[\s*_`\"'$(\[{]{0,8}(?:(?:option|choice|answer|letter)[:\s]{1,3})?[*_\"'(\[{]{0,4}"
    r"(?P<letter>[A-Z])(?![\w'+#])(?P<mark>[*_`\"'$)\]}.:]{0,6})(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
# Text after a letter that is an answer and not a word: an explanation, or "is correct".
_AFTER = re.compile(
    r"\s{0,2}(?:[-—,;(\n]|(?:because|since|as)\b|is\s(?:the\s)?(?:most\s)?(?:correct|right|best|answer)\b)"
)
_ANOTHER = re.compile(r"\s{0,2}(?:[,/&+(]|or\b|and\b)\s{0,2}(?:or\s|maybe\s)?[*_(\[\"']{0,4}([A-Z])(?![\w'])")
_SAID = re.compile(
    r"(?<!not )(?<!n't )\b(?i:choose|pick|go with|is|it's|be|so|therefore|definitely)[,:]?\s"
    r"(?:option\s|choice\s)?[*_(]{0,3}([A-Z])[*_).!]{0,4}$"
)
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*")


class Choice(Grader, frozen=True, tag="choice"):
    """Compares letters. ``choices``: texts of the choices, if an answer may be one of them instead."""

    choices: Annotated[tuple[str, ...], msgspec.Meta(max_length=len(LETTERS))] = ()

    def check(self, answer: Any) -> None:
        super().check(answer)
        letters, letter = self._letters(), _letter_of(answer)
        if len(letter) != 1 or letter not in letters:
            raise ValueError(f"the answer must be one of the letters {letters[0]} to {letters[-1]}")

    def grade(self, text: str, target: str) -> Outcome:
        found, wanted = read(text, self._letters(), self.choices), _letter_of(target)
        if found is None:
            return verdict(False, None, "no choice is given as the answer")
        return verdict(found == wanted, found, f"{'equals' if found == wanted else 'differs from'} {wanted}")

    def _letters(self) -> str:
        return LETTERS[: len(self.choices)] if self.choices else LETTERS


def _letter_of(target: str) -> str:
    return bare(plain(target)).strip("()").upper()


def read(text: str, letters: str = LETTERS, choices: Sequence[str] = ()) -> str | None:
    """Returns the letter of an answer: boxed, after a label, else in bold or at the start of a line.

    Returns None if there is none, or if several letters are in bold or at the start of lines.
    """
    text = plain(text)
    for marked in (boxed(text), labelled(text)):
        if marked is not None and (found := _head(marked.partition("\n")[0], letters, choices)):
            return found
    lines = [line for line in text.splitlines() if line.strip()]
    for candidates in (_BOLD.findall(text[-2000:]), [*lines[:1], *lines[-1:]]):
        named = {letter for one in candidates if (letter := _head(one, letters, choices))}
        if named:
            return named.pop() if len(named) == 1 else None
    said = _SAID.search(lines[-1][-400:]) if lines else None
    return said[1] if said and said[1] in letters else None


def _head(text: str, letters: str, choices: Sequence[str]) -> str | None:
    """Returns the letter at the beginning of a text, or of the choice that the text repeats."""
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s{0,3}\{([^{}]{0,200})\}", r"\1", text.strip())
    if (index := _content(text, choices)) is not None:
        return letters[index]
    found = _HEAD.match(text)
    if found is None or (letter := found["letter"].upper()) not in letters:
        return None
    mark, rest = found["mark"], found["rest"]
    stands = (
        not rest.strip() or (mark if found["letter"].isupper() or ")" in mark else "") or _AFTER.match(rest)
    )
    another = _ANOTHER.match(rest)
    if not stands or (another and another[1].upper() in letters and another[1].upper() != letter):
        return None
    other = _content(rest.lstrip(" -:,").partition("\n")[0], choices)
    return letter if other is None or letters[other] == letter else None


def _content(text: str, choices: Sequence[str]) -> int | None:
    """Returns the index of the choice that equals the text, or None unless exactly one does."""
    said = bare(text).casefold()
    found = [index for index, one in enumerate(choices) if bare(plain(one)).casefold() == said]
    return found[0] if said and len(found) == 1 else None
