"""Incremental text: UTF-8 split across tokens, and stop strings split across deltas."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence

from chorale.harmony.vocab import Vocabulary


class TextDecoder:
    """Incremental decoder. Its results, concatenated, equal ``vocab.decode`` of all ids."""

    __slots__ = ("_decode", "_state", "_vocab")

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode, self._state = decoder.decode, decoder.getstate

    def feed(self, token_id: int) -> str:
        """Return the text completed by a token ("" inside a character). Raises ``TokenIdError``."""
        return self._decode(self._vocab.token_bytes(token_id))

    def feed_all(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the text of several tokens, and how many of the last ones belong only to an incomplete
        character."""
        text = self._decode(self._vocab.decode_bytes(token_ids))
        num_bytes, num_held = len(self._state()[0]), 0
        while num_held < len(token_ids):
            num_bytes -= len(self._vocab.token_bytes(token_ids[-1 - num_held]))
            if num_bytes < 0:
                break
            num_held += 1
        return text, num_held

    def flush(self) -> str:
        """Return U+FFFD for an incomplete character, else "". The decoder can be used again."""
        return self._decode(b"", True)


class StopStrings:
    """Finds the first stop string in a stream of text, and holds back text that could become one.

    Of several stop strings the one that *ends* first wins; of those that end together, the longest. So the
    result does not depend on how the text was split into deltas. Text after a match is dropped.
    """

    __slots__ = ("_held", "_include", "_longest", "_matched", "_pattern", "_stops")

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        """``include``: the matched stop string itself is emitted. Empty strings are ignored."""
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._pattern = re.compile("|".join(map(re.escape, self._stops))) if self._stops else None
        self._held = ""
        self._matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that can be shown now, and the stop string if it has been reached, else None."""
        if self._pattern is None:
            return text, None
        if self._matched is not None:
            return "", self._matched
        buffer = self._held + text
        if self._pattern.search(buffer) is not None and (match := self._first_match(buffer)) is not None:
            return self._finish(buffer, *match)
        return self._hold(buffer), None

    def pass_over(self, text: str) -> str:
        """Take text in which a stop string may begin but not end. Return what can be shown now."""
        return self._hold(self._held + text)

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, int] | None:
        """Return begin and end of the first stop string, or None.

        Stop strings that end within the held text are skipped: ``pass_over`` has let them through.
        """
        held = len(self._held)
        matches = ((buffer.find(stop, max(0, held + 1 - len(stop))), stop) for stop in self._stops)
        found = [(at + len(stop), -len(stop)) for at, stop in matches if at >= 0]
        if not found:
            return None
        end, size = min(found)
        return end + size, end

    def _hold(self, buffer: str) -> str:
        shown = len(buffer) - self._partial_len(buffer)
        self._held = buffer[shown:]
        return buffer[:shown]

    def _finish(self, buffer: str, begin: int, end: int) -> tuple[str, str]:
        self._matched = buffer[begin:end]
        self._held = ""
        return buffer[: end if self._include else begin], self._matched

    def _partial_len(self, buffer: str) -> int:
        """Return the length of the longest tail of ``buffer`` with which a stop string begins."""
        for size in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


def encode_words(words: Iterable[str], vocab: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Encode each word twice, as at the start of text and as after a space, because the tokens differ.
    Returns no duplicates."""
    spellings = (text for word in words for text in (word, f" {word.lstrip()}"))
    return tuple(dict.fromkeys(ids for text in spellings if (ids := tuple(vocab.encode(text)))))
