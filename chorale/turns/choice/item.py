"""OpenItem: the output item that is being written, between ItemOpened and ItemClosed."""

from __future__ import annotations

from dataclasses import dataclass, field

from chorale.engine.types import TokenLogprobs
from chorale.tools.contract import CitationStream, CitedText, ToolIdentity, UrlCitation
from chorale.turns.choice.partial_json import InputReader
from chorale.turns.choice.stops import StopFilter
from chorale.turns.events import ItemDelta, ItemKind

Token = tuple[int, TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call to a built-in tool that is being written. ``identity`` is None if the tool does not exist."""

    recipient: str
    channel: str
    identity: ToolIdentity | None
    item_id: str
    texts: list[str] = field(default_factory=list)


class OpenItem:
    """Collects text and its tokens until a delta is due.

    ``stops``: stop strings within its text; ``reader``: extracts the text from surrounding syntax;
    ``citations``: converts citation marks to links; ``call``: set if the text is a call to a built-in tool.
    """

    def __init__(
        self,
        index: int,
        kind: ItemKind,
        stops: StopFilter | None = None,
        reader: InputReader | None = None,
        citations: CitationStream | None = None,
        call: WrittenCall | None = None,
    ) -> None:
        self.index = index
        self.kind = kind
        self.call = call
        self.is_blank = True  # nothing but white space so far
        self.is_filtered = any((stops, reader, citations, call))
        self.is_plain = False  # more text needs neither ``add`` nor ``delta``
        self._stops = stops
        self._reader = reader
        self._citations = citations
        self.cited: list[UrlCitation] = []  # citations in text that ``delta`` has returned or will return
        self._texts: list[str] = []
        self._tokens: list[Token] = []

    def add(self, text: str, tokens: list[Token]) -> str | None:
        """Adds content. Returns the stop string that it completed; then only ``delta`` may be called."""
        matched = None
        if self._stops is not None:
            text, tokens, matched = self._stops.feed(text, tokens)
            if matched is not None:
                self._stops = None  # held-back text belongs to the stop string
        if self._reader is not None:
            text = self._reader.feed(text)
        if self._citations is not None:
            text = self._read_cited(self._citations.feed(text))
        if text:
            self._texts.append(text)
            if self.is_blank and not text.isspace():
                self.is_blank = False
        self._tokens += tokens
        return matched

    def add_text(self, text: str) -> None:
        """Adds text without tokens."""
        self._texts.append(text)

    def release(self) -> None:
        """Releases held-back text (a partial stop string or wrapping) once the content is complete."""
        if self._reader is not None and (held := self._reader.finish()):
            self._texts.append(held)
        if self._stops is not None:
            text, tokens = self._stops.flush()
            if text and self._citations is not None:
                text = self._read_cited(self._citations.feed(text))
            if text:
                self._texts.append(text)
            self._tokens += tokens
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

    def delta(self) -> ItemDelta | None:
        """Returns all text since the last delta, or None."""
        texts, tokens = self._texts, self._tokens
        if not texts and not tokens:
            return None
        self._texts, self._tokens = [], []
        token_ids = tuple([token for token, _ in tokens])
        logprobs = tuple([entry for _, entry in tokens if entry is not None])
        return ItemDelta(self.index, "".join(texts), token_ids, logprobs)
