"""【cursor†L5-L9】 in the model's text becomes ``([domain](url))`` with a ``url_citation``, piece by piece.

A mark with a cursor that nobody knows stays as the model wrote it. The pieces joined do not depend on how
the text was cut: what could still become a mark is held back, never more than ``_MAX_MARK`` characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from chorale.tools.browser.page import Link
from chorale.tools.contract import CitedText, UrlCitation
from chorale.tools.net.urls import domain_of

# (cursor, line) -> what is cited, or None. The line is None when the mark names none.
Lookup = Callable[[int, int | None], Link | None]

_MAX_MARK = 256
_MARK = re.compile(r"【(\d{1,9})†([^†【】]{1,200})(?:†[^†【】]{1,200})?】")
_PARTIAL = re.compile(r"【(?:\d{1,9}(?:†[^†【】]*(?:†[^†【】]*)?)?)?$")
_LINE = re.compile(r"L(\d{1,9})")
_MARKDOWN = str.maketrans({"(": "%28", ")": "%29", " ": "%20", "<": "%3C", ">": "%3E"})


class CitationRewriter:
    """One text part. Implements ``CitationStream``."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._held = ""
        self._num_chars = 0  # of the rewritten text so far

    def feed(self, text: str) -> list[CitedText]:
        text = self._held + text
        pieces, end = self._marks(text)
        partial = _PARTIAL.search(text, max(end, len(text) - _MAX_MARK))
        cut = partial.start() if partial else len(text)
        self._held = text[cut:]
        return pieces + self._plain(text[end:cut])

    def finish(self) -> list[CitedText]:
        held, self._held = self._held, ""
        return self._plain(held)

    def _marks(self, text: str) -> tuple[list[CitedText], int]:
        pieces: list[CitedText] = []
        end = 0
        for match in _MARK.finditer(text):
            if match.end() - match.start() > _MAX_MARK:
                continue
            line = _LINE.match(match.group(2))
            link = self._lookup(int(match.group(1)), int(line.group(1)) if line else None)
            if link is None or not link.url:
                continue
            pieces += self._plain(text[end : match.start()])
            pieces.append(self._cited(link))
            end = match.end()
        return pieces, end

    def _plain(self, text: str) -> list[CitedText]:
        self._num_chars += len(text)
        return [CitedText(text)] if text else []

    def _cited(self, link: Link) -> CitedText:
        domain = domain_of(link.url) or link.url
        shown = f" ([{domain}]({link.url.translate(_MARKDOWN)})) "
        start = self._num_chars
        self._num_chars += len(shown)
        return CitedText(shown, UrlCitation(start, self._num_chars, link.url, link.title or domain))
