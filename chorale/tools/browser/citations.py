"""Incremental rewriting of 【cursor†L5-L9】 to ``([domain](url))`` with a ``url_citation``.

A mark with an unknown cursor is left unchanged. The result does not depend on how the input is split: a
possible beginning of a mark is held back, up to ``_MAX_MARK`` characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from chorale.tools.contract import CitedText, Link, UrlCitation
from chorale.tools.net.urls import domain_of

# (cursor, line) -> the cited link, or None. The line is None if the mark has none.
Lookup = Callable[[int, int | None], Link | None]

_MAX_MARK = 256
_MARK = re.compile(r"【(\d{1,9})†([^†【】]{1,200})(?:†[^†【】]{1,200})?】")
_PARTIAL = re.compile(r"【(?:\d{1,9}(?:†[^†【】]*(?:†[^†【】]*)?)?)?$")
_LINE = re.compile(r"L(\d{1,9})")
_MARKDOWN = str.maketrans({"(": "%28", ")": "%29", " ": "%20", "<": "%3C", ">": "%3E"})


class CitationRewriter:
    """Rewrites one text part. Implements ``CitationStream``."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._held = ""
        self._num_chars = 0  # length of the rewritten text so far

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
