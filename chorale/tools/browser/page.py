"""A page as the model sees it: wrapped lines with numbers, links with ids. Pure values and functions.

Source of the display: the gpt-oss reference browser, which is what the model was trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from chorale.tools.errors import ToolError

WIDTH = 80
MAX_FIND_RESULTS = 50
_FIND_LINES = 4
_FIND_CONTEXT = 4  # a link of a find page opens this many lines above its match

# The brackets of links and citations are ours: page text never contains them.
_ESCAPES = str.maketrans({"【": "〖", "】": "〗", "†": "‡", "\u200b": None, "\r": None, "\x00": None})

CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Link:
    url: str
    title: str = ""
    loc: int | None = None  # line to open at: links of a find page


@dataclass(frozen=True, slots=True)
class Page:
    """``text`` may contain 【id†title†domain】 marks whose ids are keys of ``links``."""

    url: str  # empty: search results
    title: str
    text: str
    kind: Literal["web", "search", "find"] = "web"
    links: Mapping[int, Link] = field(default_factory=dict)

    def lines(self) -> list[str]:
        return wrap(self.text)


def escape(text: str) -> str:
    """Text of others, without the characters that mean something in our display."""
    return text.translate(_ESCAPES)


def link_mark(number: int, title: str, domain: str = "") -> str:
    """``【3†Title†example.org】``; the domain is left out within a page's own site."""
    shown = " ".join(escape(title).split()) or domain or "link"
    return f"【{number}†{shown}†{domain}】" if domain else f"【{number}†{shown}】"


def wrap(text: str) -> list[str]:
    """Lines of at most 80 columns, broken at spaces; a longer word is cut. Linear in the text."""
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
    """The window that begins at line ``loc``. Raises ``ToolError`` when there is no such line."""
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
    """Numbered lines from ``loc`` on: as many as asked for, and never more than the token budget."""
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


def _shorten(url: str, limit: int = 1024) -> str:
    return url if len(url) <= limit else url[: limit - 1] + "…"


def find(page: Page, pattern: str) -> Page:
    """Exact matches, case ignored, as a page whose links open the original at the match."""
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
    """A line whose link marks are reduced to their titles. A mark that the wrap cut stays cut."""
    parts = line.split("【")
    out = [parts[0]]
    for part in parts[1:]:
        inside, closed, rest = part.partition("】")
        fields = inside.split("†")
        out.append((fields[1] if closed and len(fields) > 1 else inside) + rest)
    return "".join(out)
