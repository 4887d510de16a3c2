"""OpenItem: the output item that is being written, between ItemOpened and ItemClosed."""

from __future__ import annotations

from collections.abc import Iterable

from chorale.engine.types import TokenLogprobs
from chorale.tools.contract import CitationStream, CitedText, UrlCitation
from chorale.turns.events import ItemDelta, ItemKind
from chorale.turns.partial_json import InputReader
from chorale.turns.stops import StopFilter

Token = tuple[int, TokenLogprobs | None]


class OpenItem:
    """Collects text and its tokens until a delta is due.

    ``stops``: watched over its text; ``reader``: takes the text out of what the model writes around it;
    ``citations``: makes links of citation marks.
    """

    __slots__ = (
        "_citations",
        "_logprobs",
        "_reader",
        "_stops",
        "_texts",
        "_tokens",
        "cited",
        "index",
        "is_blank",
        "kind",
    )

    def __init__(
        self,
        index: int,
        kind: ItemKind,
        stops: StopFilter | None = None,
        reader: InputReader | None = None,
        citations: CitationStream | None = None,
    ) -> None:
        self.index = index
        self.kind = kind
        self.is_blank = True  # nothing but white space so far
        self._stops = stops
        self._reader = reader
        self._citations = citations
        self.cited: list[UrlCitation] = []  # within the text that ``delta`` has given or will give
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, text: str, tokens: list[Token]) -> str | None:
        """More content; returns the stop string that it completed, after which only ``delta`` is left."""
        matched = None
        if self._stops is not None:
            text, tokens, matched = self._stops.feed(text, tokens)
            if matched is not None:
                self._stops = None  # what it still holds belongs to the stop string
        if self._reader is not None:
            text = self._reader.feed(text)
        if self._citations is not None:
            text = self._read_cited(self._citations.feed(text))
        if text:
            self._texts.append(text)
            if self.is_blank and not text.isspace():
                self.is_blank = False
        self._keep(tokens)
        return matched

    def add_text(self, text: str) -> None:
        """Text that no token wrote."""
        self._texts.append(text)

    def release(self) -> None:
        """No more content: what only began like a stop string, or a wrapping, is text after all."""
        if self._reader is not None and (held := self._reader.finish()):
            self._texts.append(held)
        if self._stops is not None:
            text, tokens = self._stops.flush()
            if text and self._citations is not None:
                text = self._read_cited(self._citations.feed(text))
            if text:
                self._texts.append(text)
            self._keep(tokens)
        if self._citations is not None:
            held = self._read_cited(self._citations.finish())
            self._citations = None
            if held:
                self._texts.append(held)

    def _read_cited(self, pieces: list[CitedText]) -> str:
        self.cited += [piece.citation for piece in pieces if piece.citation is not None]
        return "".join([piece.text for piece in pieces])

    def take_cited(self) -> list[UrlCitation]:
        cited, self.cited = self.cited, []
        return cited

    def _keep(self, tokens: Iterable[Token]) -> None:
        for token, logprobs in tokens:
            self._tokens.append(token)
            if logprobs is not None:
                self._logprobs.append(logprobs)

    def delta(self) -> ItemDelta | None:
        """Everything since the last delta as one, or None."""
        texts, tokens = self._texts, self._tokens
        if not texts and not tokens:
            return None
        text = texts[0] if len(texts) == 1 else "".join(texts)
        made = ItemDelta(self.index, text, tuple(tokens), tuple(self._logprobs))
        self._texts, self._tokens, self._logprobs = [], [], []
        return made
