"""Helpers of the tools' tests: run one call to its end, and a browser over web pages in memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from chorale.config.engine import ToolConfig
from chorale.tools.box import Box
from chorale.tools.browser.history import History
from chorale.tools.browser.html import html_page
from chorale.tools.browser.offline import OfflinePages
from chorale.tools.browser.tool import Browser, PageCache
from chorale.tools.contract import (
    CitationStream,
    Progress,
    RequestTools,
    ToolCall,
    ToolResult,
    UrlCitation,
    WebSearchRequest,
)
from chorale.tools.net.addresses import AddressPolicy
from chorale.tools.net.fetch import Fetcher, FetchLimits
from chorale.tools.service import BuiltinToolService, start_tools

Caller = Callable[[ToolCall], AsyncGenerator[Progress | ToolResult, None]]


def cite(stream: CitationStream, text: str) -> tuple[str, tuple[UrlCitation, ...]]:
    """Rewrites a complete text through a fresh stream. Returns the text and its citations."""
    pieces = stream.feed(text) + stream.finish()
    return "".join(p.text for p in pieces), tuple(p.citation for p in pieces if p.citation is not None)


def count_words(text: str) -> int:
    """Replaces the tokenizer's count in tests of the budget."""
    return len(text.split())


async def drive(caller: Caller, recipient: str, content: Any) -> tuple[list[Progress], ToolResult]:
    """Returns progress and the result; asserts that there is one result and that it comes last."""
    text = content if isinstance(content, str) else json.dumps(content)
    events = [event async for event in caller(ToolCall(recipient, text, "call_1"))]
    results = [event for event in events if isinstance(event, ToolResult)]
    assert len(results) == 1
    assert events[-1] is results[0]
    assert results[0].content
    return [event for event in events if not isinstance(event, ToolResult)], results[0]


def make_browser(
    pages: dict[str, str], options: WebSearchRequest | None = None, state: Any = None
) -> Browser:
    """``pages``: address to HTML."""
    backend = OfflinePages([html_page(body.encode(), url) for url, body in pages.items()])
    fetcher = Fetcher(AddressPolicy(), FetchLimits(seconds=1))
    history = History.restored(state)
    return Browser(backend, fetcher, PageCache(), count_words, options or WebSearchRequest(), history)


@contextlib.asynccontextmanager
async def service_of(
    environment: Mapping[str, str] | None = None, **config: Any
) -> AsyncIterator[BuiltinToolService]:
    """Yields the tools of an HTTP process, from its operator's configuration."""
    service = await start_tools(ToolConfig(**config), environment or {}, count_words)
    try:
        yield service
    finally:
        await service.aclose()


@contextlib.asynccontextmanager
async def box_of(service: BuiltinToolService, request: RequestTools, state: Any = None) -> AsyncIterator[Box]:
    """Yields the tools of one response."""
    box = await service.open(request, session_key="k", state=state)
    try:
        yield box
    finally:
        await box.aclose()
