"""Search services over HTTP, each defined by its request and the location of hits in its response.

Sources: SearXNG search API (``format=json``), Exa ``/search``, You.com ``/v1/search``, Brave Web Search,
Tavily ``/search``. Keys come from the operator's environment and go to that service only.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chorale.harmony.json_text import loads
from chorale.tools.browser.page import Page
from chorale.tools.contract import WebSearchRequest
from chorale.tools.errors import ToolError
from chorale.tools.net.fetch import Fetcher
from chorale.tools.net.urls import in_domains, parse_url

MAX_RESULTS = 20
_SNIPPET_LEN = 1200
_TAG = re.compile(r"</?(?:b|strong|em|i|mark|span|p|br)\b[^<>]{0,200}>", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Hit:
    url: str
    title: str
    snippet: str


class SearchBackend:
    """A source of hits. ``online``: pages that it does not store may be fetched from the network."""

    online = True

    async def search(self, query: str, topn: int, options: WebSearchRequest) -> list[Hit]:
        """Returns at most ``topn`` hits within the allowed domains. Raises ``ToolError``."""
        raise NotImplementedError

    async def page(self, url: str) -> Page | None:
        """Returns a page that the back end stores itself, or None if it must be fetched."""
        return None


@dataclass(frozen=True, slots=True)
class SearchService:
    """A search service. ``hits`` extracts (url, title, snippet) records from the decoded response."""

    name: str
    url: str
    environment: str  # environment variable with the key; empty: no key is required
    request: Callable[[str, int, WebSearchRequest, str], _Request]
    hits: Callable[[Any], list[tuple[Any, Any, Any]]]


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    headers: Mapping[str, str]
    params: Mapping[str, Any] | None = None
    body: Any = None


def _sites(query: str, options: WebSearchRequest) -> str:
    """Adds ``site:`` terms to the query, for services without a field for domains."""
    sites = " OR ".join(f"site:{domain}" for domain in options.allowed_domains[:20])
    return f"{query} ({sites})" if sites else query


def _country(options: WebSearchRequest) -> str | None:
    """Returns the two-letter country code at the end of a location ("Paris, FR")."""
    last = (options.user_location or "").rpartition(",")[2].strip()
    return last.upper() if len(last) == 2 and last.isascii() and last.isalpha() else None


def _searxng(query: str, topn: int, options: WebSearchRequest, key: str) -> _Request:
    return _Request("GET", {}, {"q": _sites(query, options), "format": "json"})


def _exa(query: str, topn: int, options: WebSearchRequest, key: str) -> _Request:
    text = {"maxCharacters": _SNIPPET_LEN}
    body: dict[str, Any] = {"query": query, "numResults": topn, "contents": {"text": text}}
    if options.allowed_domains:
        body["includeDomains"] = list(options.allowed_domains)
    if country := _country(options):
        body["userLocation"] = country
    return _Request("POST", {"x-api-key": key}, None, body)


def _you(query: str, topn: int, options: WebSearchRequest, key: str) -> _Request:
    params = {"query": _sites(query, options), "count": topn}
    if country := _country(options):
        params["country"] = country
    return _Request("GET", {"X-API-Key": key}, params)


def _brave(query: str, topn: int, options: WebSearchRequest, key: str) -> _Request:
    params = {"q": _sites(query, options)[:400], "count": topn}
    if country := _country(options):
        params["country"] = country
    return _Request("GET", {"X-Subscription-Token": key, "Accept": "application/json"}, params)


def _tavily(query: str, topn: int, options: WebSearchRequest, key: str) -> _Request:
    depth = "advanced" if options.context_size == "high" else "basic"
    body: dict[str, Any] = {"query": query, "max_results": topn, "search_depth": depth}
    if options.allowed_domains:
        body["include_domains"] = list(options.allowed_domains)
    return _Request("POST", {"Authorization": f"Bearer {key}"}, None, body)


def _flat(*path: str, snippet: str) -> Callable[[Any], list[tuple[Any, Any, Any]]]:
    def pick(answer: Any) -> list[tuple[Any, Any, Any]]:
        for key in path:
            answer = answer.get(key, {}) if isinstance(answer, dict) else {}
        records = answer if isinstance(answer, list) else []
        return [(r.get("url"), r.get("title"), r.get(snippet)) for r in records if isinstance(r, dict)]

    return pick


def _you_hits(answer: Any) -> list[tuple[Any, Any, Any]]:
    results = answer.get("results") if isinstance(answer, dict) else None
    sections = [results.get(name) for name in ("web", "news")] if isinstance(results, dict) else []
    found = []
    for record in (r for section in sections if isinstance(section, list) for r in section):
        if isinstance(record, dict):
            extra = record.get("snippets")
            texts = [record.get("description"), *(extra if isinstance(extra, list) else ())]
            joined = " … ".join(text for text in texts if isinstance(text, str))
            found.append((record.get("url"), record.get("title"), joined))
    return found


SERVICES: dict[str, SearchService] = {
    service.name: service
    for service in (
        SearchService("searxng", "", "", _searxng, _flat("results", snippet="content")),
        SearchService("exa", "https://api.exa.ai/search", "EXA_API_KEY", _exa,
                      _flat("results", snippet="text")),
        SearchService("you", "https://ydc-index.io/v1/search", "YDC_API_KEY", _you, _you_hits),
        SearchService("brave", "https://api.search.brave.com/res/v1/web/search", "BRAVE_API_KEY", _brave,
                      _flat("web", "results", snippet="description")),
        SearchService("tavily", "https://api.tavily.com/search", "TAVILY_API_KEY", _tavily,
                      _flat("results", snippet="content")),
    )
}  # fmt: skip


class HttpSearch(SearchBackend):
    """A search back end over one of ``SERVICES``. ``url`` replaces the service's default address."""

    def __init__(self, service: SearchService, fetcher: Fetcher, key: str, url: str | None = None) -> None:
        self._service = service
        self._fetcher = fetcher
        self._key = key
        self._url = url or service.url

    async def search(self, query: str, topn: int, options: WebSearchRequest) -> list[Hit]:
        request = self._service.request(query, topn, options, self._key)
        fetched = await self._fetcher.call(
            request.method, self._url, headers=request.headers, params=request.params, json=request.body
        )
        if not 200 <= fetched.status < 300:
            raise ToolError(f"the search service answered with status {fetched.status}")
        try:
            answer = loads(fetched.body)
        except (ValueError, RecursionError):
            raise ToolError("the search service's response is not JSON") from None
        return usable(self._service.hits(answer), topn, options)


def usable(records: list[tuple[Any, Any, Any]], topn: int, options: WebSearchRequest) -> list[Hit]:
    """Returns hits for valid and allowed addresses, without duplicates."""
    hits: dict[str, Hit] = {}
    for url, title, snippet in records:
        if not isinstance(url, str) or len(hits) >= topn:
            continue
        try:
            parsed = parse_url(url)
        except ToolError:
            continue
        if in_domains(parsed.host, options.allowed_domains):
            hits.setdefault(url, Hit(url, _clean(title) or url, _clean(snippet)[:_SNIPPET_LEN]))
    return list(hits.values())


def _clean(text: Any) -> str:
    if not isinstance(text, str):
        return ""
    return " ".join(html.unescape(_TAG.sub("", text)).split())
