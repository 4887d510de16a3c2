"""Sentences as NLTK's Punkt tokenizer finds them (Kiss and Strunk 2006, "Unsupervised Multilingual Sentence
Boundary Detection"), because lm-evaluation-harness counts sentences with it.

The parameters of a language are its known abbreviations, collocations across a period, frequent first words,
and for each word if it was seen capitalized, at the start of sentences or inside. The patterns are those of
``nltk/tokenize/punkt.py`` in NLTK 3.10.4 (Apache-2.0).
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from chorale.evaluation.tasks.patterns import compiled

# Bits of a word's orthographic contexts.
_MIDDLE_UPPER = 1 << 2
_START_LOWER = 1 << 4
_UPPER = 1 << 1 | 1 << 2 | 1 << 3
_LOWER = 1 << 4 | 1 << 5 | 1 << 6

_NOT_IN_WORDS = r"(?:[)\";}\]\*:@\'\({\[\u2018\u2019\u201c\u201d\xab\xbb?!])"
_SEVERAL = r"(?:\-{2,}|\.{2,}|(?:\.\s){2,}\.)"
_WORD = compiled(
    rf"({_SEVERAL}|(?=[^\(\"\`{{\[:;&\#\*@\)}}\]\-,])\S+?"
    rf"(?=\s|$|{_NOT_IN_WORDS}|{_SEVERAL}|,(?=$|\s|{_NOT_IN_WORDS}|{_SEVERAL}))|\S)"
)
_POSSIBLE_END = compiled(rf"[\.\?!](?=(?P<after>{_NOT_IN_WORDS}|\s+(?P<next>\S+)))")
_CLOSING = compiled(r'["\')\]}\u2018\u2019\u201c\u201d\xab\xbb]+?(?:\s+|(?=--)|$)', re.MULTILINE)
_NUMBER = compiled(r"^-?[\.,]?\d[\d,\.-]*\.?$")
_ELLIPSIS = compiled(r"\.\.+$")
_INITIAL = compiled(r"[^\W\d]\.$")
_ANY_NUMBER = "##number##"
_ENDS = (".", "?", "!")
_PUNCTUATION = (";", ":", ",", ".", "!", "?")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a language. Words are in lower case, abbreviations without their last period."""

    abbreviations: frozenset[str]
    collocations: frozenset[tuple[str, str]]
    starters: frozenset[str]
    contexts: Mapping[str, int]


def split_sentences(text: str, parameters: Parameters) -> list[str]:
    """Returns the sentences of a text, closing quotes and brackets included."""
    sentences = []
    skipped = 0  # characters of this piece that belong to the sentence before
    pieces = list(_pieces(text, parameters))
    for place, (start, stop) in enumerate(pieces):
        start += skipped
        skipped = 0
        if place + 1 < len(pieces):
            following, end = pieces[place + 1]
            closing = _CLOSING.match(text[following:end])
            if closing:
                sentences.append(text[start : following + len(closing.group().rstrip())])
                skipped = closing.end()
                continue
        if text[start:stop]:
            sentences.append(text[start:stop])
    return sentences


def _pieces(text: str, parameters: Parameters) -> Iterator[tuple[int, int]]:
    """Yields the text between sentence breaks as (start, stop)."""
    start = 0
    for match, context in _contexts(text):
        if _has_break(context, parameters):
            yield start, match.end()
            start = match.start("next") if match.group("next") else match.end()
    yield start, len(text.rstrip())


def _contexts(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yields each possible end of a sentence with its context: the word before it and what follows.

    Of several in one word, such as "Stop!!!", only the last counts.
    """
    start = stop = 0  # of the word before the last possible end
    last: re.Match[str] | None = None
    for match in _POSSIBLE_END.finditer(text):
        space = _last_space(text[stop : match.start()])
        begins = stop + space + 1 if space else start
        if last is not None and stop <= begins:
            yield last, text[start:stop] + last.group() + last.group("after")
        last, start, stop = match, begins, match.start()
    if last is not None:
        yield last, text[start:stop] + last.group() + last.group("after")


def _last_space(text: str) -> int:
    """Returns the place of the last white space, or 0."""
    return max(0, *(text.rfind(space) for space in string.whitespace))


class _Token:
    """A word with its case-independent type and the marks of the two passes."""

    __slots__ = ("abbreviation", "breaks", "ellipsis", "final_period", "text", "type")

    def __init__(self, text: str, parameters: Parameters) -> None:
        self.text = text
        self.type: str = _NUMBER.sub(_ANY_NUMBER, text.lower())
        self.final_period = text.endswith(".")
        self.breaks = text in _ENDS
        self.ellipsis = not self.breaks and bool(_ELLIPSIS.match(text))
        self.abbreviation = False
        if not (self.breaks or self.ellipsis) and self.final_period and not text.endswith(".."):
            word = text[:-1].lower()
            known = parameters.abbreviations
            self.abbreviation = word in known or word.split("-")[-1] in known
            self.breaks = not self.abbreviation

    @property
    def bare_type(self) -> str:
        """The type without its final period."""
        return self.type[:-1] if len(self.type) > 1 and self.final_period_of_type else self.type

    @property
    def final_period_of_type(self) -> bool:
        """True if the type ends in a period; that of a number does not."""
        return self.type[-1] == "."

    @property
    def type_in_sentence(self) -> str:
        """The type, without its final period if that ends a sentence."""
        return self.bare_type if self.breaks else self.type


def _has_break(context: str, parameters: Parameters) -> bool:
    """Returns whether a sentence ends before the last word of ``context``."""
    words = (word for line in context.split("\n") if line.strip() for word in _WORD.findall(line))
    tokens = [_Token(word, parameters) for word in words]
    for token, following in itertools.pairwise(tokens):
        if token.final_period:
            _decide(token, following, parameters)
        if token.breaks:
            return True
    return False


def _decide(token: _Token, following: _Token, parameters: Parameters) -> None:
    """Decides from the next word if a word with a period ends its sentence."""
    kind, next_kind = token.bare_type, following.type_in_sentence
    initial = bool(_INITIAL.match(token.text))
    if (kind, next_kind) in parameters.collocations:
        token.breaks, token.abbreviation = False, True
        return
    upper = following.text[0].isupper()
    starts = _starts_sentence(following, parameters)
    begins = starts or (upper and next_kind in parameters.starters)
    if (token.abbreviation or token.ellipsis) and not initial and begins:
        token.breaks = True
        return
    if not (initial or kind == _ANY_NUMBER):
        return
    always_upper = upper and not parameters.contexts.get(next_kind, 0) & _LOWER
    if starts is False or (starts is None and initial and always_upper):
        token.breaks, token.abbreviation = False, True


def _starts_sentence(token: _Token, parameters: Parameters) -> bool | None:
    """Returns what a word's case says about whether it starts a sentence; None if nothing."""
    if token.text in _PUNCTUATION:
        return False
    contexts = parameters.contexts.get(token.type_in_sentence, 0)
    if token.text[0].isupper() and contexts & _LOWER and not contexts & _MIDDLE_UPPER:
        return True
    if token.text[0].islower() and (contexts & _UPPER or not contexts & _START_LOWER):
        return False
    return None
