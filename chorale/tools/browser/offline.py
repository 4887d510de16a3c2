"""A folder of pages (html, md, txt) as an offline web, for tests, demonstrations and machines without
network.

The in-memory index (BM25 over words) is built once. A page's address is its ``<link rel="canonical">``, the
``url:`` of its front matter, or ``https://offline.invalid/`` and its path.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from chorale.errors import ConfigError
from chorale.tools.browser.backends import Hit, SearchBackend
from chorale.tools.browser.html import html_page, markdown_page, text_page
from chorale.tools.browser.page import Page, plain
from chorale.tools.contract import WebSearchRequest
from chorale.tools.errors import ToolError
from chorale.tools.net.urls import in_domains, parse_url

_SUFFIXES = (".html", ".htm", ".md", ".markdown", ".txt")
_MAX_FILES = 20_000
_MAX_FILE_BYTES = 2 * 2**20
_WORD = re.compile(r"\w+")
_CANONICAL = re.compile(rb"<link[^<>]{0,300}rel=[\"']?canonical[^<>]{0,600}>", re.IGNORECASE)
_HREF = re.compile(rb"href=[\"']([^\"'<>\s]{1,2000})[\"']", re.IGNORECASE)
_FRONT = re.compile(r"\A---\n(.{0,4000}?)\n---\n", re.DOTALL)
_K1, _B = 1.5, 0.75  # the usual BM25 constants
_SNIPPET_LINES = 3


@dataclass(frozen=True, slots=True)
class _Entry:
    page: Page
    counts: Counter[str]
    length: int


class OfflinePages(SearchBackend):
    """A search back end over the pages of a folder."""

    online = False

    def __init__(self, pages: list[Page]) -> None:
        self._by_url = {_same(page.url): page for page in pages}
        self._entries = [_index(page) for page in pages]
        self._mean_len = sum(e.length for e in self._entries) / max(len(self._entries), 1) or 1.0
        self._num_with = Counter(word for entry in self._entries for word in entry.counts)

    def __len__(self) -> int:
        return len(self._entries)

    async def page(self, url: str) -> Page | None:
        return self._by_url.get(_same(url))

    async def search(self, query: str, topn: int, options: WebSearchRequest) -> list[Hit]:
        words = _words(query)
        scored = [(self._score(entry, words), entry) for entry in self._entries]
        best = sorted((item for item in scored if item[0] > 0), key=lambda item: -item[0])
        hits = []
        for _, entry in best:
            if in_domains(parse_url(entry.page.url).host, options.allowed_domains):
                hits.append(Hit(entry.page.url, entry.page.title, _snippet(entry.page, words)))
            if len(hits) == topn:
                break
        return hits

    def _score(self, entry: _Entry, words: list[str]) -> float:
        total = 0.0
        for word in words:
            count = entry.counts.get(word, 0)
            if count:
                rare = math.log(
                    1 + (len(self._entries) - self._num_with[word] + 0.5) / (self._num_with[word] + 0.5)
                )
                norm = 1 - _B + _B * entry.length / self._mean_len
                total += rare * count * (_K1 + 1) / (count + _K1 * norm)
        return total


def load_folder(folder: str | Path) -> OfflinePages:
    """Loads a folder. Raises ``ConfigError`` if it is missing or contains no page."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"--browser-tool-pages {folder}: this folder does not exist")
    files = [path for path in sorted(root.rglob("*")) if path.suffix.lower() in _SUFFIXES and path.is_file()]
    if not files:
        raise ConfigError(f"--browser-tool-pages {folder}: contains no {', '.join(_SUFFIXES)} file")
    if len(files) > _MAX_FILES:
        raise ConfigError(f"--browser-tool-pages {folder}: contains more than {_MAX_FILES} pages")
    return OfflinePages([_read(path, root) for path in files])


def _read(path: Path, root: Path) -> Page:
    try:
        body = path.read_bytes()[:_MAX_FILE_BYTES]
        url = "https://offline.invalid/" + quote(path.relative_to(root).as_posix())
        if path.suffix.lower() in (".html", ".htm"):
            return html_page(body, _canonical(body) or url)
        text = body.decode("utf-8", errors="replace")
        front = _FRONT.match(text)
        fields = _fields(front.group(1)) if front else {}
        text = text[front.end() :] if front else text
        url = fields.get("url") or url
        page = markdown_page(text, url) if path.suffix.lower() != ".txt" else text_page(text, url)
        parse_url(page.url)
    except (OSError, ToolError) as error:
        raise ConfigError(f"offline page {path}: {error}") from None
    return Page(page.url, fields.get("title") or page.title, page.text, "web", page.links)


def _canonical(body: bytes) -> str | None:
    tag = _CANONICAL.search(body[:65536])
    href = _HREF.search(tag.group(0)) if tag else None
    return href.group(1).decode("utf-8", errors="replace") if href else None


def _fields(front: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in front.split("\n") if ":" in line)
    return {key.strip().lower(): value.strip().strip("\"'") for key, _, value in pairs}


def _same(url: str) -> str:
    """Normalises an address: drops the fragment and a trailing slash."""
    return url.partition("#")[0].rstrip("/")


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _index(page: Page) -> _Entry:
    counts = Counter(_words(plain(page.text)))
    for word in _words(page.title):
        counts[word] += 3  # words of the title have more weight
    return _Entry(page, counts, sum(counts.values()))


def _snippet(page: Page, words: list[str]) -> str:
    """Returns the lines around the best match."""
    lines = [plain(line).strip(" #*") for line in page.lines()]
    lines = [line for line in lines if line and not line.startswith("URL: ")]
    scores = [len(set(_words(line)) & set(words)) for line in lines]
    if not lines:
        return ""
    best = max(range(len(lines)), key=scores.__getitem__)
    return " ".join(lines[max(0, best - 1) : best - 1 + _SNIPPET_LINES + (best == 0)])
