"""Conversion of documents to pages: HTML (with lxml, linear on hostile input), Markdown, plain text and JSON.

Links become 【id†text†domain】 in their original order. Scripts, styles and hidden parts are removed.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import re
from collections.abc import Iterator, Mapping

from lxml import etree

from chorale.tools.browser.page import Page, escape, link_mark
from chorale.tools.contract import Link
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
_MAX_TEXT = 2**20  # characters per page
_MAX_TITLE = 4096
_MAX_LINKS = 2000
_MAX_DEPTH = 256  # nested elements; the parser scans all open elements at each end tag
_PIECE = 64 * 1024  # bytes given to a codec or a parser at once
_MD_LINK = re.compile(
    r"(?<!!)\[([^\[\]\n]{1,300}+)\]\(\s*+<?([^\s()<>]{1,2000}+)>?(?:\s++\"[^\"\n]{0,200}+\")?\s*+\)"
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
    heading = re.search(r"^#{1,6}[ \t]++(.{1,300})$", text, re.MULTILINE)
    title = heading.group(1).strip("# \t") if heading else url.rpartition("/")[2]
    return Page(url, escape(title), _with_url(url, "".join(out)), "web", collected.links)


def html_page(body: bytes, url: str, charset: str | None = None) -> Page:
    """Converts HTML to text in reading order, one block per line."""
    writer = _Writer(url)
    if body.strip():
        _parse(body, charset, writer)
    title = " ".join(writer.title.split()) or url
    return Page(url, escape(title[:300]), _with_url(url, writer.finish()), "web", writer.links.links)


def _parse(body: bytes, charset: str | None, writer: _Writer) -> None:
    """Parses HTML with the header's charset, else the document's own (lxml reads it), else UTF-8.

    Builds no tree: to append an attribute to an element, libxml2 walks the earlier ones (quadratic time).
    """
    if charset and _is_codec(charset):
        body = b"".join(piece.encode("utf-8", errors="replace") for piece in _pieces(body, charset))
    known = None if not charset and _declares_charset(body) else "utf-8"
    parser = etree.HTMLParser(encoding=known, no_network=True, huge_tree=False, target=writer)
    # Fed in pieces, because the parser cannot be interrupted within one. An error ends the page there.
    with contextlib.suppress(_EnoughError, etree.LxmlError, ValueError):
        for start in range(0, len(body), _PIECE):
            parser.feed(body[start : start + _PIECE])
        parser.close()


# Python codecs that do not replace invalid bytes, produce lone surrogates, or take quadratic time.
_NOT_OF_PAGES = frozenset(
    {"idna", "punycode", "undefined", "unicode-escape", "raw-unicode-escape", "utf-7", "utf-32"}
)


def _is_codec(name: str) -> bool:
    """Returns whether a name is a text encoding; Python also has codecs such as "hex"."""
    try:
        b"a".decode(name)
        return codecs.lookup(name).name not in _NOT_OF_PAGES
    except LookupError:
        return False
    except ValueError:  # a multi-byte codec, or a name with a NUL
        return "\0" not in name and codecs.lookup(name).name not in _NOT_OF_PAGES


def _declares_charset(body: bytes) -> bool:
    return b"charset" in body[:2048].lower() or body[:2] in (b"\xff\xfe", b"\xfe\xff")


def _pieces(body: bytes, charset: str) -> Iterator[str]:
    """Yields the text in pieces, between which other threads run."""
    name = codecs.lookup(charset).name
    if name == "utf-16" and body[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        name = "utf-16-le"
    decoder = codecs.getincrementaldecoder(name)("replace")
    for start in range(0, len(body), _PIECE):
        yield decoder.decode(body[start : start + _PIECE], start + _PIECE >= len(body))


def _decode(body: bytes, charset: str | None) -> str:
    """Returns the text of a page, without most of what exceeds ``_MAX_TEXT`` characters."""
    size, found = 0, []
    for piece in _pieces(body, charset if charset and _is_codec(charset) else "utf-8"):
        found.append(piece)
        size += len(piece)
        if size > _MAX_TEXT:
            break
    return "".join(found)


def _with_url(url: str, text: str) -> str:
    return f"\nURL: {escape(url)}\n{text}" if url else text


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


class _EnoughError(Exception):
    """The page exceeds the limit on characters or depth; the rest is omitted."""


class _Writer:
    """Collects text from the parser's events. Inline text is joined; blocks begin new lines."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.links = _Links(url)
        self.title = ""  # text of the first title element
        self._in_title = self._has_title = self._has_base = False
        self._num_chars = 0
        self._lines: list[str] = []
        self._line = io.StringIO()
        self._has_text = False  # whether the current line has text
        self._depth = self._skip_depth = 0
        self._pre_depth = 0
        self._open: list[bool] = []  # whether each open element "a" is a link
        # For each open link: its address, the line that it interrupts, whether that line has text.
        self._anchors: list[tuple[str, io.StringIO, bool]] = []

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _EnoughError
        if tag == "title" and not self._has_title:
            self._in_title = self._has_title = True
        elif tag == "base" and "href" in attributes and not self._has_base:
            self._set_base(attributes["href"])
        if self._skip_depth or tag in _SKIPPED or "hidden" in attributes:
            self._skip_depth += 1
            return
        if tag in _BLOCKS:
            self._break()
            self._put(_HEADINGS.get(tag, "  * " if tag == "li" else ""))
        elif tag == "br":
            self._break()
        elif tag in ("td", "th") and self._has_text:
            self._line.write(" | ")
        elif tag == "img" and (alt := attributes.get("alt", "")[:200]).strip():
            self._put(f"[Image: {escape(alt)}]")
        elif tag == "a":
            self._open.append(bool(attributes.get("href")))
            if self._open[-1]:
                self._anchors.append((attributes["href"], self._line, self._has_text))
                self._line, self._has_text = io.StringIO(), False
        self._pre_depth += tag == "pre"

    def end(self, tag: str) -> None:
        self._depth -= 1
        self._in_title = False
        if self._skip_depth:
            self._skip_depth -= 1
            return
        if tag == "a" and self._open.pop():
            self._close_link()
        if tag in _BLOCKS:
            self._break()
        self._pre_depth -= tag == "pre"

    def data(self, text: str) -> None:
        if self._in_title and len(self.title) < _MAX_TITLE:
            self.title += text
        if not self._skip_depth:
            self._add(text)

    def close(self) -> None:
        """Ends the page, for the parser."""

    def _set_base(self, href: str) -> None:
        self._has_base = True
        with contextlib.suppress(ToolError):
            self.links = _Links(str(join_url(parse_url(self._url), href)))

    def _put(self, text: str) -> None:
        self._line.write(text)
        self._has_text = self._has_text or (bool(text) and not text.isspace())

    def _add(self, text: str) -> None:
        self._num_chars += len(text)
        if self._num_chars > _MAX_TEXT:
            raise _EnoughError
        if self._pre_depth and not self._anchors:
            first, *others = escape(text).split("\n")
            self._put(first)
            for line in others:
                self._break(keep_empty=True)
                self._put(line)
        else:
            self._put(re.sub(r"\s+", " ", escape(text)))

    def _close_link(self) -> None:
        text = self._line.getvalue()
        href, self._line, self._has_text = self._anchors.pop()
        if text.strip():
            self._put(self.links.mark(href, text))

    def _break(self, *, keep_empty: bool = False) -> None:
        """Ends the line; inside a link a block boundary is only a space."""
        if self._anchors:
            self._line.write(" ")
            return
        line = self._line.getvalue()
        line = line.rstrip() if self._pre_depth else _tidy(line)
        self._line, self._has_text = io.StringIO(), False
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
