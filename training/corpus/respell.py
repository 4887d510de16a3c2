"""Makes the model repeat a given word with the tokens in which it was given, if possible.

The tokenizer splits a word differently after a quotation mark than after a space (" zap" + "ia", but
"z" + "apia"), which the tokens of an unknown word do not reveal. Every split gives the same text. So the
targets of training copy the given tokens one by one, and only the first changes its form: "zap" + "ia". A
word whose first token has no form without a space is split as by the tokenizer ("dis" + "posal"), which the
token's features reveal.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from training.corpus.words import vocabulary


@functools.cache
def _cuts() -> tuple[list[str | None], list[str]]:
    """Returns (the prefix before the letters of each token, or None if it is no word; the letters)."""
    prefixes: list[str | None] = []
    letters: list[str] = []
    for token in map(vocabulary().token_bytes, range(199998)):
        text = token.decode("utf-8", "replace")
        start = 0 if text[:1].isalnum() else 1
        is_word = text[start:].isalpha() and text[0] not in "\r\n\ufffd"
        prefixes.append(text[:start] if is_word else None)
        letters.append(text[start:] if is_word else "")
    return prefixes, letters


def _words(ids: list[int]) -> Iterator[tuple[int, int]]:
    """Yields spans of tokens that form one word: at most one sign, then letters only."""
    prefixes = _cuts()[0]
    start = None
    for at, token in enumerate(ids):
        prefix = prefixes[token] if token < len(prefixes) else None
        if start is not None and prefix == "":
            continue
        if start is not None:
            yield start, at
        start = at if prefix is not None else None
    if start is not None:
        yield start, len(ids)


class Given:
    """The words of a conversation so far, with their tokens."""

    def __init__(self) -> None:
        self.words: dict[str, dict[str, list[int]]] = {}  # word -> prefix -> tokens

    def add(self, ids: list[int]) -> None:
        prefixes, letters = _cuts()
        for start, end in _words(ids):
            prefix = prefixes[ids[start]] or ""
            forms = self.words.setdefault("".join(letters[token] for token in ids[start:end]), {})
            forms.pop(prefix, None)  # moves the latest occurrence to the end
            forms[prefix] = ids[start:end]

    def spell(self, words: Sequence[str]) -> None:
        """Marks words that are written letter by letter from now on."""
        for word in words:
            self.words[word] = {"": [_encode(letter)[0] for letter in word]}

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of ``text``; given words keep their tokens."""
        prefixes, letters = _cuts()
        plain = vocabulary().encode(text)
        ids: list[int] = []
        done = 0
        for start, end in _words(plain):
            ids += plain[done:start]
            done = end
            word = "".join(letters[token] for token in plain[start:end])
            ids += self._form(prefixes[plain[start]] or "", word) or plain[start:end]
        return ids + plain[done:]

    def _form(self, prefix: str, word: str) -> list[int] | None:
        forms = self.words.get(word)
        if forms is None:
            return None
        if prefix in forms:
            return forms[prefix]
        first, *rest = next(reversed(forms.values()))
        return _first(prefix, first) + rest


@functools.lru_cache(maxsize=200_000)
def _encode(text: str) -> tuple[int, ...]:
    return tuple(vocabulary().encode(text))


def _first(prefix: str, token: int) -> list[int]:
    """Returns tokens for ``prefix`` and the letters of ``token``; only a space joins the first of them."""
    letters = _cuts()[1][token]
    if prefix in ("", " "):
        return list(_encode(prefix + letters))
    return [*_encode(prefix), *_encode(letters)]
