"""Texts to score, as token ids: the same on every machine, in five kinds, of exact lengths.

A counter-based generator fills the templates of ``texts.json``, so that nothing has to be downloaded and no
text is random noise: a model predicts some tokens well and others badly. ``echoes`` repeat a passage at
several distances, among them gpt-oss's sliding window and one token less, which expose a window that is off
by one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from chorale.harmony.vocab import load_vocabulary

KINDS = ("prose", "code", "conversation", "echoes", "numbers")
_SIXTY_FOUR = (1 << 64) - 1
_DISTANCES = (127, 128, 64, 129, 512)  # of echoes, in tokens
_FILE = json.loads(Path(__file__).with_name("texts.json").read_text("utf-8"))
_KINDS: dict[str, Any] = _FILE["kinds"]
_SLOTS: dict[str, Any] = _FILE[
    "slots"
]  # name -> strings, which may use the slots above, or a limit of numbers


@dataclass(frozen=True, slots=True)
class Text:
    """One text. ``name`` is unique in a run."""

    name: str
    kind: str
    length: int
    token_ids: tuple[int, ...]


class Draw:
    """Numbers from a counter (SplitMix64), the same in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _SIXTY_FOUR

    def below(self, limit: int) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _SIXTY_FOUR
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _SIXTY_FOUR
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _SIXTY_FOUR
        return (z ^ (z >> 31)) % limit

    def one(self, words: Sequence[str]) -> str:
        return words[self.below(len(words))]


def make_texts(lengths: Sequence[int], number: int) -> list[Text]:
    """Returns ``number`` texts of each length, cycling through the kinds."""
    texts = []
    for length in lengths:
        for index, kind in zip(range(number), itertools.cycle(KINDS), strict=False):
            draw = Draw(1_000_003 * length + index)
            ids = _cut(_echoes(draw) if kind == "echoes" else _filled(draw, kind), length)
            texts.append(Text(f"{kind}-{length}-{index}", kind, length, ids))
    return texts


def _cut(pieces: Iterator[str], length: int) -> tuple[int, ...]:
    """Returns the first ``length`` tokens of an endless sequence of pieces, each encoded separately."""
    ids: list[int] = []
    for piece in pieces:
        ids += _encode(piece)
        if len(ids) >= length:
            return tuple(ids[:length])
    raise AssertionError("the pieces ended")


@lru_cache(maxsize=4096)
def _encode(piece: str) -> tuple[int, ...]:
    return tuple(load_vocabulary().encode_with_special(piece))


def _filled(draw: Draw, kind: str) -> Iterator[str]:
    """Yields the start of a kind, then its templates without end. Each gets a new value in every slot."""
    yield _KINDS[kind]["start"]
    for number in itertools.count(1):
        values: dict[str, Any] = {"number": number}
        for name, choices in _SLOTS.items():
            is_limit = isinstance(choices, int)
            values[name] = draw.below(choices) if is_limit else draw.one(choices).format(**values)
        yield draw.one(_KINDS[kind]["repeat"]).format(**values)


def _echoes(draw: Draw) -> Iterator[str]:
    """Yields passages, each repeated five times at one of ``_DISTANCES``."""
    number = 0
    while True:
        distance = _DISTANCES[number % len(_DISTANCES)]
        passage: list[str] = []
        for sentence in _filled(draw, "prose"):
            passage += _tokens(sentence)
            if len(passage) >= distance:
                break
        for _ in range(5):
            yield from passage[:distance]
        number += 1


@lru_cache(maxsize=4096)
def _tokens(piece: str) -> tuple[str, ...]:
    """Returns the tokens of a piece as strings, if each token decodes to valid text."""
    vocab = load_vocabulary()
    return tuple(vocab.decode([token]) for token in _encode(piece))
