"""Conversion of documents to pages: HTML (with lxml, linear on hostile input), Markdown, plain text and JSON.

Links become 【id†text†domain】 in their original order. Scripts, styles and hidden parts are removed.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Any

from lxml import etree

from chorale.tools.browser.page import Link, Page, escape, link_mark
from chorale.tools.errors import ToolError
from chorale.tools.net.fetch import Fetched
from chorale.tools.net.urls import domain_of, join_url, parse_url

_SKIPPED = frozenset({
    "script", "style", "noscript", "template", "svg", "math", "iframe", "object", "embed", "canvas",
    "video", "audio", "head", "select", "option", "button", "input", "textarea", "dialog",
})  # fmt: skip
_BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "body", "center", "dd", "details", "dialog", "div",
    "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5",
    "h6", "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section", "summary", "table", "tbody",
    "thead", "tr", "ul",
})  # fmt: skip
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_MAX_TEXT = 2**20  # most characters of a page
_MAX_LINKS = 2000
_MD_LINK = re.compile(
    r"(?<!!)\[([^\[\]\n]{1,300})\]\(\s*<?([^\s()<>]{1,2000})>?(?:\s+\"[^\"\n]{0,200}\")?\s*\)"
)
_TEXT_TYPES = ("application/json", "application/xml", "application/javascript", "application/x-yaml", "")


def page_of(fetched: Fetched) -> Page:
    """Converts a response to a page. Raises ``ToolError`` for a status other than 2xx and for binary data."""
    if not 200 <= fetched.status < 300:
        raise ToolError(f"the server answered with status {fetched.status}")
    kind = fetched.content_type
    if kind in ("text/html", "application/xhtml+xml") or (
        not kind and b"<html" in fetched.body[:2048].lower()
    ):
        return html_page(fetched.body, fetched.url, fetched.charset)
    if not (kind.startswith("text/") or kind in _TEXT_TYPES or kind.endswith(("+json", "+xml"))):
        raise ToolError(f"{kind[:80]} cannot be shown as text")
    if b"\0" in fetched.body[:4096] and fetched.charset not in ("utf-16", "utf-16le", "utf-16be"):
        raise ToolError("this is binary data, not text")
    text = _decode(fetched.body, fetched.charset)
    if kind == "text/markdown" or fetched.url.lower().endswith((".md", ".markdown")):
        return markdown_page(text, fetched.url)
    return text_page(text, fetched.url)


def source_of(fetched: Fetched) -> Page:
    """Returns the body as a plain-text page, whatever its type. Raises ``ToolError`` for binary data."""
    if b"\0" in fetched.body[:4096]:
        raise ToolError("this is binary data, not text")
    return text_page(_decode(fetched.body, fetched.charset), fetched.url, f"Source of {fetched.url}")


def text_page(text: str, url: str, title: str = "") -> Page:
    name = title or url.rstrip("/").rpartition("/")[2] or url
    return Page(url, escape(name), _with_url(url, escape(text[:_MAX_TEXT])))


def markdown_page(text: str, url: str) -> Page:
    """Converts Markdown: inline links get ids, the rest is unchanged."""
    collected = _Links(url)
    out, end = [], 0
    text = text[:_MAX_TEXT]
    for match in _MD_LINK.finditer(text):
        mark = collected.mark(match.group(2), match.group(1))
        out += [escape(text[end : match.start()]), mark]
        end = match.end()
    out.append(escape(text[end:]))
    heading = re.search(r"^#{1,6}[ \t]+(.{1,300})$", text, re.MULTILINE)
    title = heading.group(1).strip("# \t") if heading else url.rpartition("/")[2]
    return Page(url, escape(title), _with_url(url, "".join(out)), "web", collected.links)


def html_page(body: bytes, url: str, charset: str | None = None) -> Page:
    """Converts HTML to text in reading order, one block per line."""
    root = _parse(body, charset)
    if root is None:
        return Page(url, escape(url), _with_url(url, ""))
    title = " ".join((root.findtext(".//title") or "").split()) or url
    writer = _Writer(_base_url(root, url))
    for event, element in etree.iterwalk(root, events=("start", "end")):
        if not isinstance(element.tag, str):
            continue
        writer.start(element) if event == "start" else writer.end(element)
        if writer.num_chars > _MAX_TEXT:
            break
    return Page(url, escape(title[:300]), _with_url(url, writer.finish()), "web", writer.links.links)


def _parse(body: bytes, charset: str | None) -> Any:
    """Parses HTML with the header's charset, else the document's own (lxml reads it), else UTF-8."""
    if charset and _is_codec(charset):
        body = body.decode(charset, errors="replace").encode("utf-8", errors="replace")
    known = None if not charset and _declares_charset(body) else "utf-8"
    parser = etree.HTMLParser(
        encoding=known, no_network=True, huge_tree=False, remove_comments=True, remove_pis=True
    )
    try:
        return etree.fromstring(body, parser) if body.strip() else None
    except (etree.LxmlError, ValueError) as error:
        raise ToolError(f"the page cannot be parsed: {error}") from None


# Python codecs that do not replace invalid bytes, produce lone surrogates, or take quadratic time.
_NOT_OF_PAGES = frozenset({"idna", "punycode", "undefined", "unicode-escape", "raw-unicode-escape", "utf-7"})


def _is_codec(name: str) -> bool:
    """Returns whether a name is a text encoding; Python also has codecs such as "hex"."""
    try:
        b"a".decode(name)
        return codecs.lookup(name).name not in _NOT_OF_PAGES
    except LookupError:
        return False
    except ValueError:  # a codec of several bytes a character, or a name with a NUL
        return "\0" not in name and codecs.lookup(name).name not in _NOT_OF_PAGES


def _declares_charset(body: bytes) -> bool:
    return b"charset" in body[:2048].lower() or body[:2] in (b"\xff\xfe", b"\xfe\xff")


def _decode(body: bytes, charset: str | None) -> str:
    known = charset if charset and _is_codec(charset) else "utf-8"
    return body.decode(known, errors="replace")


def _with_url(url: str, text: str) -> str:
    return f"\nURL: {escape(url)}\n{text}" if url else text


def _base_url(root: Any, url: str) -> str:
    base = root.find(".//base[@href]")
    if base is None:
        return url
    try:
        return str(join_url(parse_url(url), base.get("href")))
    except ToolError:
        return url


class _Links:
    """Numbers links in order of appearance; equal addresses share an id."""

    def __init__(self, base: str) -> None:
        self._base = parse_url(base)
        self._own = domain_of(base)
        self._read: dict[str, tuple[int, str] | None] = {}  # href -> (id, domain); None: cannot be opened
        self._ids: dict[str, int] = {}
        self.links: dict[int, Link] = {}

    def mark(self, href: str, text: str) -> str:
        """Returns the mark of a link, or only its text if it cannot be opened."""
        title = " ".join(text.split())[:200]
        if href not in self._read:
            if len(self._read) >= _MAX_LINKS:
                return escape(text)
            self._read[href] = self._number(href, title)
        known = self._read[href]
        if known is None:
            return escape(text)
        number, domain = known
        return link_mark(number, title, "" if domain == self._own else domain)

    def _number(self, href: str, title: str) -> tuple[int, str] | None:
        try:
            target = str(join_url(self._base, href))
        except ToolError:
            return None
        number = self._ids.setdefault(target, len(self._ids))
        self.links.setdefault(number, Link(target, title))
        return number, domain_of(target)


class _Writer:
    """Collects text during the walk over the tree. Inline text is joined; blocks begin new lines."""

    def __init__(self, base: str) -> None:
        self.links = _Links(base)
        self.num_chars = 0
        self._lines: list[str] = []
        self._line: list[str] = []
        self._skip_depth = 0
        self._pre_depth = 0
        self._anchors: list[tuple[str, list[str]]] = []  # open links: address, the line they interrupt

    def start(self, element: Any) -> None:
        tag = element.tag.lower()
        if self._skip_depth or tag in _SKIPPED or element.get("hidden") is not None:
            self._skip_depth += 1
            return
        if tag in _BLOCKS:
            self._break()
            self._line.append(_HEADINGS.get(tag, "  * " if tag == "li" else ""))
        elif tag == "br":
            self._break()
        elif tag in ("td", "th") and any(part.strip() for part in self._line):
            self._line.append(" | ")
        elif tag == "img" and element.get("alt", "").strip():
            self._line.append(f"[Image: {escape(element.get('alt'))[:200]}]")
        elif tag == "a" and element.get("href"):
            self._anchors.append((element.get("href"), self._line))
            self._line = []
        self._pre_depth += tag == "pre"
        self._add(element.text)

    def end(self, element: Any) -> None:
        tag = element.tag.lower()
        if self._skip_depth:
            self._skip_depth -= 1
        else:
            if tag == "a" and element.get("href") and self._anchors:
                self._close_link()
            if tag in _BLOCKS:
                self._break()
            self._pre_depth -= tag == "pre"
        if not self._skip_depth:
            self._add(element.tail)

    def _add(self, text: str | None) -> None:
        if not text:
            return
        self.num_chars += len(text)
        if self._pre_depth and not self._anchors:
            first, *others = escape(text).split("\n")
            self._line.append(first)
            for line in others:
                self._break(keep_empty=True)
                self._line.append(line)
        else:
            self._line.append(re.sub(r"\s+", " ", escape(text)))

    def _close_link(self) -> None:
        href, outer = self._anchors.pop()
        text = "".join(self._line)
        self._line = outer
        if text.strip():
            self._line.append(self.links.mark(href, text))

    def _break(self, *, keep_empty: bool = False) -> None:
        """Ends the line; inside a link a block boundary is only a space."""
        if self._anchors:
            self._line.append(" ")
            return
        line = "".join(self._line)
        line = line.rstrip() if self._pre_depth else _tidy(line)
        self._line = []
        if line.strip(" *#|") or (keep_empty and self._lines and self._lines[-1]):
            self._lines.append(line)

    def finish(self) -> str:
        while self._anchors:
            self._close_link()
        self._pre_depth = 0
        self._break()
        return "\n".join(self._spaced())

    def _spaced(self) -> Iterator[str]:
        """Yields the lines with a blank line above each heading."""
        for line in self._lines:
            if line.startswith("#"):
                yield ""
            yield line


def _tidy(line: str) -> str:
    indent = "  * " if line.startswith("  * ") else ""
    return indent + re.sub(r" {2,}", " ", line[len(indent) :]).strip()
