"""Pages as shown to the model: numbered, wrapped lines and links with ids. Pure values and functions.

The format is that of the gpt-oss reference browser, with which the model was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from chorale.tools.contract import Link
from chorale.tools.errors import ToolError

WIDTH = 80
MAX_FIND_RESULTS = 50
_FIND_LINES = 4
_FIND_CONTEXT = 4  # number of lines shown above a match that is opened from a find page

# Brackets of links and citations, which are removed from page text.
_ESCAPES = {"【": "〖", "】": "〗", "†": "‡", "\u200b": "", "\r": "", "\x00": ""}

CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Page:
    """``text`` may contain 【id†title†domain】 marks whose ids are keys of ``links``."""

    url: str  # empty for search results
    title: str
    text: str
    kind: Literal["web", "search", "find"] = "web"
    links: Mapping[int, Link] = field(default_factory=dict)

    def lines(self) -> list[str]:
        return wrap(self.text)


def escape(text: str) -> str:
    """Removes the characters with a meaning in the display from untrusted text."""
    for found, instead in _ESCAPES.items():  # str.translate would hold the GIL for 80 ns per character
        text = text.replace(found, instead)
    return text


def link_mark(number: int, title: str, domain: str = "") -> str:
    """Returns ``【3†Title†example.org】``; the domain is omitted for links within a site."""
    shown = " ".join(escape(title).split()) or domain or "link"
    return f"【{number}†{shown}†{domain}】" if domain else f"【{number}†{shown}】"


def wrap(text: str) -> list[str]:
    """Wraps text at spaces to lines of at most 80 columns, splitting longer words. Takes linear time."""
    return [piece for line in text.split("\n") for piece in (_wrap_line(line) if line else ("",))]


def _wrap_line(line: str) -> Iterator[str]:
    start, length = 0, len(line)
    while length - start > WIDTH:
        space = line.rfind(" ", start + 1, start + WIDTH + 1)
        cut = space if space > start else start + WIDTH
        yield line[start:cut]
        start = cut + 1 if line[cut] == " " else cut
    yield line[start:]


def display(page: Page, cursor: int, loc: int, num_lines: int, view_tokens: int, count: CountTokens) -> str:
    """Returns the window that begins at line ``loc``. Raises ``ToolError`` if there is no such line."""
    lines = page.lines()
    if not 0 <= loc < len(lines):
        raise ToolError(
            f"Invalid location parameter: `{loc}`. Cannot exceed page maximum of {len(lines) - 1}."
        )
    shown = _window(lines, loc, num_lines, view_tokens, count)
    end = loc + len(shown) - 1
    header = f"{page.title} ({_shorten(page.url)})" if page.url else page.title
    return f"[{cursor}] {header}\n**viewing lines [{loc} - {end}] of {len(lines) - 1}**\n\n" + "\n".join(
        shown
    )


def _window(lines: list[str], loc: int, num_lines: int, view_tokens: int, count: CountTokens) -> list[str]:
    """Returns numbered lines from ``loc``: at most ``num_lines``, within the token budget."""
    last = len(lines) if num_lines <= 0 else min(len(lines), loc + num_lines)
    shown: list[str] = []
    budget = view_tokens
    for number in range(loc, last):
        line = f"L{number}: {lines[number]}"
        budget -= count(line + "\n")
        if budget < 0 and shown:
            break
        shown.append(line)
    return shown


def _shorten(url: str) -> str:
    return url if len(url) <= 1024 else url[:1023] + "…"


def find(page: Page, pattern: str) -> Page:
    """Returns a page of case-insensitive matches whose links open the original page at the match."""
    wanted = pattern.lower()
    lines = page.lines()
    chunks: list[str] = []
    links: dict[int, Link] = {}
    number = 0
    while number < len(lines) and len(chunks) < MAX_FIND_RESULTS:
        if wanted not in lines[number].lower():
            number += 1
            continue
        mark = link_mark(len(chunks), f"match at L{number}")
        links[len(chunks)] = Link(page.url, page.title, loc=max(0, number - _FIND_CONTEXT))
        chunks.append(f"# {mark}\n" + "\n".join(plain(line) for line in lines[number : number + _FIND_LINES]))
        number += _FIND_LINES
    shown = escape(pattern)
    text = "\n\n".join(chunks) or f"No `find` results for pattern: `{shown}`"
    title = f"Find results for text: `{shown}` in `{page.title}`"
    return Page(page.url, title, text, "find", links)


def plain(line: str) -> str:
    """Reduces the link marks in a line to their titles. A mark split by wrapping is unchanged."""
    parts = line.split("【")
    out = [parts[0]]
    for part in parts[1:]:
        inside, closed, rest = part.partition("】")
        fields = inside.split("†")
        out.append((fields[1] if closed and len(fields) > 1 else inside) + rest)
    return "".join(out)
