"""Texts to score, as token ids: the same on every machine, in five kinds, of exact lengths.

A counter-based generator makes them from word lists, so that nothing has to be downloaded and no text is
random noise: a model predicts some tokens well and others badly. ``echoes`` repeat a passage at several
distances, among them gpt-oss's sliding window and one token less, which expose a window that is off by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from chorale.harmony.vocab import load_vocabulary

_SIXTY_FOUR = (1 << 64) - 1
_LISTS: dict[str, list[str]] = json.loads(Path(__file__).with_name("words.json").read_text("utf-8"))


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
    kinds = tuple(KINDS)
    texts = []
    for length in lengths:
        for index in range(number):
            kind = kinds[index % len(kinds)]
            ids = _cut(KINDS[kind](Draw(1_000_003 * length + index)), length)
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


def _prose(draw: Draw) -> Iterator[str]:
    while True:
        join = draw.one(_LISTS["joins"])
        subject = draw.one(_LISTS["subjects"])
        if join.strip():
            subject = subject[0].lower() + subject[1:]
        verb, thing, end = (draw.one(_LISTS[name]) for name in ("verbs", "objects", "ends"))
        yield f"{join}{subject} {verb} {thing} {end} "


def _code(draw: Draw) -> Iterator[str]:
    while True:
        action, noun, other = (draw.one(_LISTS[name]) for name in ("actions", "nouns", "nouns"))
        drawn = {"limit": draw.below(500), "modulus": 2 + draw.below(7)}
        yield _LISTS["code"][0].format(action=action, noun=noun, other=other, **drawn)


def _numbers(draw: Draw) -> Iterator[str]:
    day = 1
    yield "date,station,low,high,rain\n"
    while True:
        low = draw.below(20) - 5
        first, second = draw.below(1000), draw.below(1000)
        yield f"2024-{1 + day // 28 % 12:02d}-{1 + day % 28:02d},"
        yield f"{draw.one(('north', 'south', 'coast'))},{low},{low + draw.below(12)},{draw.below(90) / 10}\n"
        if draw.below(6) == 0:
            yield f"# {first} + {second} = {first + second}; {first} * 3 = {first * 3}\n"
        day += 1


def _conversation(draw: Draw) -> Iterator[str]:
    yield from _LISTS["system"]
    while True:
        a, b = draw.below(100), draw.below(100)
        numbers = {"a": a, "b": b, "c": draw.below(100), "s": a + b, "n": 2 + draw.below(80)}
        filled = {**numbers, "w": draw.one(_LISTS["words"])}
        asked, told = (draw.one(_LISTS[name]).format(**filled) for name in ("questions", "answers"))
        for part in _LISTS["turn"]:
            yield part.format(question=asked, answer=told)


def _echoes(draw: Draw) -> Iterator[str]:
    """Yields passages, each repeated five times at one of ``_DISTANCES`` (in tokens)."""
    number = 0
    while True:
        distance = _DISTANCES[number % len(_DISTANCES)]
        passage: list[str] = []
        for sentence in _prose(draw):
            passage += _tokens(sentence)
            if len(passage) >= distance:
                break
        for _ in range(5):
            yield from passage[:distance]
        number += 1


_DISTANCES = (127, 128, 64, 129, 512)


@lru_cache(maxsize=4096)
def _tokens(piece: str) -> tuple[str, ...]:
    """Returns the tokens of a piece as strings, if each token decodes to valid text."""
    vocab = load_vocabulary()
    return tuple(vocab.decode([token]) for token in _encode(piece))


KINDS: dict[str, Callable[[Draw], Iterator[str]]] = {
    "prose": _prose,
    "code": _code,
    "conversation": _conversation,
    "echoes": _echoes,
    "numbers": _numbers,
}
