"""The tokens in which the model writes a word that it was given: those it was given, as far as they go.

A word of several tokens is cut elsewhere after a quotation mark than after a space (" zap" + "ia", but
"z" + "apia"), which nothing in the tokens of an unknown word says. Any cut reads the same. So the
targets of training copy the given tokens one by one, and only the first changes its form: "zap" + "ia". A
word whose first token has no such form is spelt as the tokenizer does ("dis" + "posal"), which the features of
the token say.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from training.corpus.words import vocabulary


@functools.cache
def _cuts() -> tuple[list[str | None], list[str]]:
    """(what stands before the letters of each token, None: no word; the letters)."""
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
    """Spans of tokens that make one word: letters behind at most one sign, then letters alone."""
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
    """The words that stand in a conversation so far, with the tokens that they stand in."""

    def __init__(self) -> None:
        self.words: dict[str, dict[str, list[int]]] = {}  # word -> what stands before it -> tokens

    def add(self, ids: list[int]) -> None:
        prefixes, letters = _cuts()
        for start, end in _words(ids):
            prefix = prefixes[ids[start]] or ""
            forms = self.words.setdefault("".join(letters[token] for token in ids[start:end]), {})
            forms.pop(prefix, None)  # the last occurrence comes last
            forms[prefix] = ids[start:end]

    def spell(self, words: Sequence[str]) -> None:
        """From here on, these words are written letter by letter."""
        for word in words:
            self.words[word] = {"": [_encode(letter)[0] for letter in word]}

    def encode(self, text: str) -> list[int]:
        """``text`` in tokens: words that were given as they were given."""
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
    """The letters of ``token`` behind ``prefix``; a sign other than a space is a token of its own."""
    letters = _cuts()[1][token]
    if prefix in ("", " "):
        return list(_encode(prefix + letters))
    return [*_encode(prefix), *_encode(letters)]
