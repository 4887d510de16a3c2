"""The browser's cursors: the pages in the order in which they were shown, saved between responses.

The saved state contains search and find pages in full, since they are small. For a web page it contains the
address and title; the text is fetched again when the model returns to it in a later response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chorale.tools.browser.page import Page
from chorale.tools.contract import Link
from chorale.tools.errors import ToolError

MAX_PAGES = 256  # cursors per chain of responses
_MAX_STATE_TEXT = 128 * 1024  # characters of search and find pages in a state; the newest are kept


@dataclass(slots=True)
class Entry:
    """One cursor. ``page`` is None after a restore until it is loaded."""

    url: str
    title: str
    page: Page | None


class History:
    def __init__(self, entries: list[Entry] | None = None) -> None:
        self._entries = entries or []

    def add(self, page: Page) -> int:
        """Adds a page and returns its cursor. Raises ``ToolError`` if there are too many pages."""
        if len(self._entries) >= MAX_PAGES:
            raise ToolError(f"no more than {MAX_PAGES} pages can be shown in one conversation")
        self._entries.append(Entry(page.url, page.title, page))
        return len(self._entries) - 1

    def drop_last(self) -> None:
        self._entries.pop()

    def entry(self, cursor: int) -> Entry:
        """Returns the entry of a cursor; -1 is the newest.

        Raises ``ToolError`` with the available cursors.
        """
        if not self._entries:
            raise ToolError("No pages to access!")
        if cursor == -1:
            return self._entries[-1]
        if not 0 <= cursor < len(self._entries):
            raise ToolError(
                f"Cursor `{cursor}` is out of range. "
                f"Available cursor indices: [0 - {len(self._entries) - 1}]."
            )
        return self._entries[cursor]

    def cited(self, cursor: int, line: int | None) -> Link | None:
        """Returns what ``【cursor†Lline】`` refers to: on a search page, the result at that line."""
        if not 0 <= cursor < len(self._entries):
            return None
        entry = self._entries[cursor]
        if entry.page is not None and entry.page.kind == "search":
            return _result_at(entry.page, line)
        return Link(entry.url, entry.title) if entry.url else None

    def state(self) -> list[dict[str, Any]]:
        """Returns the state as JSON values. Old search pages lose their text to limit its size."""
        kept, room = [], _MAX_STATE_TEXT
        for entry in reversed(self._entries):
            record: dict[str, Any] = {"url": entry.url, "title": entry.title}
            page = entry.page
            if page is not None and page.kind != "web" and len(page.text) <= room:
                room -= len(page.text)
                links = [[n, link.url, link.title, link.loc] for n, link in page.links.items()]
                record |= {"kind": page.kind, "text": page.text, "links": links}
            kept.append(record)
        return kept[::-1]

    @classmethod
    def restored(cls, state: Any) -> History:
        """Restores a state. Skips invalid entries, since another version may have written it."""
        records = state if isinstance(state, list) else []
        return cls([_entry(record) for record in records[:MAX_PAGES] if isinstance(record, Mapping)])


def _entry(record: Mapping[str, Any]) -> Entry:
    url, title = str(record.get("url", "")), str(record.get("title", ""))
    kind, text = record.get("kind"), record.get("text")
    if kind not in ("search", "find") or not isinstance(text, str):
        return Entry(url, title, None)
    links = {}
    for number, target, name, loc in record.get("links", ()):
        links[int(number)] = Link(str(target), str(name), None if loc is None else int(loc))
    return Entry(url, title, Page(url, title, text, "search" if kind == "search" else "find", links))


def _result_at(page: Page, line: int | None) -> Link | None:
    """Returns the last result at or above the line, or the first result without a line."""
    lines = page.lines()
    found = None
    for text in lines[: (line if line is not None else len(lines)) + 1]:
        for part in text.split("【")[1:]:
            number = part.partition("†")[0]
            if number.isdigit() and int(number) in page.links:
                found = page.links[int(number)]
                if line is None:
                    return found
    return found
