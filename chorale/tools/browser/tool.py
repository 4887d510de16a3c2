"""``browser.search``, ``browser.open`` and ``browser.find``: the browser of a conversation.

Web pages are untrusted: their text is escaped when it is parsed, shown in numbered lines, and never
interpreted. All conversations share a small cache of fetched pages.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from chorale.harmony.builtin_tools import browser_tools
from chorale.tools.arguments import Arguments
from chorale.tools.browser.backends import MAX_RESULTS, Hit, SearchBackend
from chorale.tools.browser.history import History
from chorale.tools.browser.html import page_of, source_of
from chorale.tools.browser.page import CountTokens, Page, display, escape, find, link_mark
from chorale.tools.contract import (
    BrowserAction,
    FindAction,
    Link,
    OpenPageAction,
    Progress,
    SearchAction,
    Source,
    SystemTool,
    ToolCall,
    ToolResult,
    WebSearchRequest,
)
from chorale.tools.errors import ToolError
from chorale.tools.net.fetch import Fetcher
from chorale.tools.net.urls import domain_of, in_domains, parse_url

_VIEW_TOKENS = {"low": 512, "medium": 1024, "high": 2048}
_MAX_QUERY_LEN = 2000
_MAX_PATTERN_LEN = 1000
_CACHE_BYTES, _CACHE_SECONDS = 32 * 2**20, 900.0
RECIPIENTS = frozenset({"browser.search", "browser.open", "browser.find"})


class PageCache:
    """A cache of pages by address, with limits on size and age. Pages are immutable and can be shared."""

    def __init__(self) -> None:
        self._pages: OrderedDict[str, tuple[float, Page]] = OrderedDict()
        self._num_bytes = 0

    def get(self, url: str) -> Page | None:
        found = self._pages.get(url)
        if found is None or time.monotonic() - found[0] > _CACHE_SECONDS:
            return None
        self._pages.move_to_end(url)
        return found[1]

    def put(self, url: str, page: Page) -> None:
        self._drop(url)
        self._pages[url] = (time.monotonic(), page)
        self._num_bytes += len(page.text)
        while self._num_bytes > _CACHE_BYTES:
            self._drop(next(iter(self._pages)))

    def _drop(self, url: str) -> None:
        found = self._pages.pop(url, None)
        if found is not None:
            self._num_bytes -= len(found[1].text)


class Browser(SystemTool):
    """The tool of a conversation. ``count``: counts the tokens of a string."""

    def __init__(
        self,
        backend: SearchBackend,
        fetcher: Fetcher,
        cache: PageCache,
        count: CountTokens,
        options: WebSearchRequest,
        history: History,
    ) -> None:
        self._backend = backend
        self._fetcher = fetcher
        self._cache = cache
        self._count = count
        self._options = options
        self.history = history
        self.namespace = browser_tools()
        self.recipients = RECIPIENTS

    def cited(self, cursor: int, line: int | None) -> Link | None:
        return self.history.cited(cursor, line)

    async def call(self, call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        """Runs a call. A failure becomes a failed result with the action as far as it could be parsed."""
        verb = call.recipient.partition(".")[2]
        action: BrowserAction = _empty_action(verb)
        try:
            arguments = Arguments.read(call.content)
            if verb == "search":
                query = arguments.text("query", _MAX_QUERY_LEN)
                action = SearchAction(query)
                yield action
                action, shown = await self._search(query, arguments)
            elif verb == "open":
                target = self._target(arguments)
                action = OpenPageAction(target.url or None)
                yield action
                shown = await self._open(target, arguments)
            else:
                pattern = arguments.text("pattern", _MAX_PATTERN_LEN)
                action = FindAction(pattern, None)
                entry = self.history.entry(arguments.number("cursor", -1))
                action = FindAction(pattern, entry.url or None)
                yield action
                shown = await self._find(pattern, arguments)
        except ToolError as fault:
            yield ToolResult(call.recipient, f"Error: {fault.message}", True, action)
        else:
            yield ToolResult(call.recipient, shown, False, action)

    # ------------------------------------------------------------------ search, open, find

    async def _search(self, query: str, arguments: Arguments) -> tuple[SearchAction, str]:
        if self._backend.online and not self._options.external_access:
            raise ToolError("web search is disabled for this request")
        asked = arguments.number("topn", 10)
        topn = max(1, min(asked if asked > 0 else 10, MAX_RESULTS))
        hits = await self._backend.search(query, topn, self._options)
        page = results_page(query, hits)
        shown = self._show(page, 0, -1)
        return SearchAction(query, tuple(Source(h.url, h.title, h.snippet) for h in hits)), shown

    def _target(self, arguments: Arguments) -> Link:
        """Returns the target of ``open``: an address, a link on a page, or a shown page (scrolling)."""
        if (address := _address(arguments)) is not None:
            return Link(str(parse_url(address)))
        cursor = arguments.number("cursor", -1)
        number = arguments.number("id", -1)
        entry = self.history.entry(cursor)
        if number < 0:
            return Link(entry.url, entry.title, loc=0)
        if entry.page is None:
            raise ToolError(f"the links of cursor `{cursor}` are gone; open the page again first")
        if number not in entry.page.links:
            raise ToolError(f"Invalid link id `{number}`.")
        return entry.page.links[number]

    async def _open(self, target: Link, arguments: Arguments) -> str:
        is_address = _address(arguments) is not None
        if arguments.flag("view_source"):
            page = await self._source(target.url)
        elif is_address or arguments.number("id", -1) >= 0:
            page = await self._load(target.url, fresh=is_address)
        else:
            page = await self._page_at(arguments.number("cursor", -1))
        loc = arguments.number("loc", -1)
        start = loc if loc >= 0 else (target.loc or 0)
        return self._show(page, start, arguments.number("num_lines", -1))

    async def _find(self, pattern: str, arguments: Arguments) -> str:
        page = await self._page_at(arguments.number("cursor", -1))
        if page.kind != "web":
            raise ToolError("Cannot run `find` on search results page or find results page")
        return self._show(await asyncio.to_thread(find, page, pattern), 0, -1)

    # ------------------------------------------------------------------ pages

    def _show(self, page: Page, loc: int, num_lines: int) -> str:
        cursor = self.history.add(page)
        try:
            return display(
                page, cursor, loc, num_lines, _VIEW_TOKENS[self._options.context_size], self._count
            )
        except ToolError:
            self.history.drop_last()
            raise

    async def _page_at(self, cursor: int) -> Page:
        entry = self.history.entry(cursor)
        if entry.page is None:
            if not entry.url:
                raise ToolError(f"the page of cursor `{cursor}` is gone; search again")
            entry.page = replace(await self._load(entry.url, fresh=False), title=entry.title)
        return entry.page

    async def _load(self, url: str, *, fresh: bool) -> Page:
        """Loads a page from the back end's own pages, the cache, or the network."""
        if not in_domains(parse_url(url).host, self._options.allowed_domains):
            raise ToolError(f"{domain_of(url)} is outside the allowed domains")
        known = await self._backend.page(url)
        if known is None and not (fresh and self._options.external_access):
            known = self._cache.get(url)
        if known is not None:
            # Another conversation may have followed a redirect that is not allowed in this one.
            if not in_domains(parse_url(known.url).host, self._options.allowed_domains):
                raise ToolError(f"{domain_of(known.url)} is outside the allowed domains")
            return known
        if not (self._backend.online and self._options.external_access):
            raise ToolError(f"Error fetching URL `{url[:1000]}`: network access is disabled")
        try:
            fetched = await self._fetcher.get(url, domains=self._options.allowed_domains)
            page = await asyncio.to_thread(page_of, fetched)
        except ToolError as fault:
            raise ToolError(f"Error fetching URL `{url[:1000]}`: {fault.message}") from None
        self._cache.put(url, page)
        return page

    async def _source(self, url: str) -> Page:
        """Loads the text of a page as its server sent it, never from a cache."""
        if not (url and self._backend.online and self._options.external_access):
            raise ToolError("the source of this page is not available")
        fetched = await self._fetcher.get(url, domains=self._options.allowed_domains)
        return source_of(fetched)

    def state(self) -> Any:
        return self.history.state()


def results_page(query: str, hits: list[Hit]) -> Page:
    """Formats search results like the reference browser: a heading, then an item per hit."""
    lines = ["", "# Search Results", ""]
    for number, hit in enumerate(hits):
        domain = domain_of(hit.url)
        lines.append(f"  * {link_mark(number, hit.title, domain)} {escape(hit.snippet)}".rstrip())
    if not hits:
        lines.append("No results.")
    links = {number: Link(hit.url, hit.title) for number, hit in enumerate(hits)}
    return Page("", escape(query), "\n".join(lines), "search", links)


def _address(arguments: Arguments) -> str | None:
    where = arguments.raw("id", -1)
    return where if isinstance(where, str) and not where.lstrip("-").isdigit() else None


def _empty_action(verb: str) -> BrowserAction:
    if verb == "open":
        return OpenPageAction(None)
    return FindAction("", None) if verb == "find" else SearchAction("")
