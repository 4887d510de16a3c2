"""search, open and find in one conversation; its state; what a request may narrow."""

from __future__ import annotations

import json

import pytest

from chorale.tools.browser.backends import Hit, SearchBackend
from chorale.tools.browser.citations import CitationRewriter
from chorale.tools.browser.page import Page
from chorale.tools.contract import (
    FindAction,
    OpenPageAction,
    SearchAction,
    WebSearchRequest,
)
from tests.support.tools.drive import drive, make_browser

PAGES = {
    "https://otters.example/sea": "<title>Sea otters</title><h1>Sea otters</h1><p>They hold hands.</p>"
    "<p>Read about <a href='https://kelp.example/'>kelp</a>.</p>",
    "https://kelp.example/": "<title>Kelp</title><p>Kelp grows fast.</p>" + "<p>filler line</p>" * 200,
    "https://rivers.example/a": "<title>Rivers</title><p>Water flows. Otters swim.</p>",
}


async def test_search_open_and_find_follow_links() -> None:
    browser = make_browser(PAGES)
    progress, found = await drive(browser.call, "browser.search", {"query": "sea otters", "topn": 2})
    assert progress == [SearchAction("sea otters")]
    assert found.content.startswith("[0] sea otters\n**viewing lines [0 - ")
    assert (
        "L3:   * 【0†Sea otters†otters.example】 Sea otters They hold hands. Read about kelp."
        in found.content
    )
    assert isinstance(found.detail, SearchAction)
    assert [s.url for s in found.detail.sources] == list(PAGES)[0:3:2]

    progress, opened = await drive(browser.call, "browser.open", {"id": 0})
    assert progress == [OpenPageAction("https://otters.example/sea")]
    assert opened.content.startswith(
        "[1] Sea otters (https://otters.example/sea)\n**viewing lines [0 - 5] of 5**"
    )

    _, kelp = await drive(browser.call, "browser.open", {"id": "0", "cursor": "1"})
    assert kelp.content.startswith("[2] Kelp (https://kelp.example/)")
    assert kelp.detail == OpenPageAction("https://kelp.example/")

    _, scrolled = await drive(browser.call, "browser.open", {"loc": 100, "num_lines": 3})
    assert "**viewing lines [100 - 102] of 202**" in scrolled.content

    progress, match = await drive(browser.call, "browser.find", {"pattern": "hands", "cursor": 1})
    assert progress == [FindAction("hands", "https://otters.example/sea")]
    assert "# 【0†match at L4】\nL1: They hold hands." in match.content
    assert match.detail == FindAction("hands", "https://otters.example/sea")

    _, at_match = await drive(browser.call, "browser.open", {"id": 0})
    assert "**viewing lines [0 - 5]" in at_match.content


@pytest.mark.parametrize(
    ("recipient", "content", "text"),
    [
        ("browser.search", "{not json", "not valid JSON"),
        ("browser.search", "[1]", "must be a JSON object"),
        ("browser.search", {}, "`query` must be"),
        ("browser.search", {"query": 3}, "`query` must be"),
        ("browser.open", {}, "No pages to access"),
        ("browser.open", {"id": "file:///etc/passwd"}, "only http and https"),
        ("browser.open", {"id": "https://nowhere.example/"}, "network access is disabled"),
        ("browser.open", {"id": True}, "must be an integer"),
        ("browser.open", {"id": 1e300}, "must be an integer"),
        ("browser.find", {"pattern": "x"}, "No pages to access"),
        ("browser.find", {"pattern": ""}, "`pattern` must be"),
        ("browser.search", "[" * 100_000, "not valid JSON"),
    ],
)
async def test_errors_are_texts_for_the_model(recipient: str, content: object, text: str) -> None:
    _, result = await drive(make_browser(PAGES).call, recipient, content)
    assert result.failed
    assert text in result.content


async def test_errors_on_a_page_leave_the_cursors_alone() -> None:
    browser = make_browser(PAGES)
    await drive(browser.call, "browser.search", {"query": "otters"})
    for content, text in [
        ({"id": 99}, "Invalid link id `99`"),
        ({"cursor": 5}, "out of range. Available cursor indices: [0 - 0]"),
        ({"loc": 4000}, "Cannot exceed page maximum"),
    ]:
        _, result = await drive(browser.call, "browser.open", content)
        assert result.failed
        assert text in result.content
    _, result = await drive(browser.call, "browser.find", {"pattern": "x"})
    assert "Cannot run `find` on search results" in result.content
    _, opened = await drive(browser.call, "browser.open", {"id": 0})
    assert opened.content.startswith("[1] ")


async def test_a_chain_continues_from_its_state() -> None:
    first = make_browser(PAGES)
    await drive(first.call, "browser.search", {"query": "otters"})
    await drive(first.call, "browser.open", {"id": 0})
    state = json.loads(json.dumps(first.state()))
    second = make_browser(PAGES, state=state)
    _, shown = await drive(second.call, "browser.open", {"cursor": 1})
    assert shown.content.startswith("[2] Sea otters (https://otters.example/sea)")
    _, linked = await drive(second.call, "browser.open", {"cursor": 0, "id": 1})
    assert linked.content.startswith("[3] ")
    branch = make_browser(PAGES, state=state)  # the parent's state is a value: branches do not mix
    _, shown = await drive(branch.call, "browser.open", {"id": "https://kelp.example/"})
    assert shown.content.startswith("[2] Kelp")


@pytest.mark.parametrize(
    "state", [None, 3, "x", [3], [{}], [{"kind": "search"}], [{"url": 1, "title": None}]]
)
async def test_a_state_of_another_version_is_ignored(state: object) -> None:
    _, found = await drive(make_browser(PAGES, state=state).call, "browser.search", {"query": "kelp"})
    assert not found.failed


async def test_allowed_domains_bind_search_and_open() -> None:
    browser = make_browser(PAGES, WebSearchRequest(allowed_domains=("kelp.example",)))
    _, found = await drive(browser.call, "browser.search", {"query": "otters kelp"})
    assert "kelp.example" in found.content
    assert "otters.example" not in found.content
    _, refused = await drive(browser.call, "browser.open", {"id": "https://otters.example/sea"})
    assert "outside the allowed domains" in refused.content


async def test_citations_refer_to_pages_and_results() -> None:
    browser = make_browser(PAGES)
    await drive(browser.call, "browser.search", {"query": "otters"})
    await drive(browser.call, "browser.open", {"id": 0})
    rewriter = CitationRewriter(browser.history.cited)
    text = "Hands【1†L4-L5】, a result【0†L3】, unknown【9†L1】, broken【1†"
    pieces = rewriter.feed(text) + rewriter.finish()
    whole = "".join(piece.text for piece in pieces)
    assert whole == (
        "Hands ([otters.example](https://otters.example/sea)) , a result "
        "([otters.example](https://otters.example/sea)) , unknown【9†L1】, broken【1†"
    )
    cited = [piece.citation for piece in pieces if piece.citation]
    assert [c.title for c in cited] == ["Sea otters", "Sea otters"]
    for citation in cited:
        shown = whole[citation.start_index : citation.end_index]
        assert shown == " ([otters.example](https://otters.example/sea)) "


async def test_a_cached_redirect_does_not_lead_out_of_the_allowed_domains() -> None:
    """Another conversation was led from kelp.example elsewhere; this one may not go there."""

    browser = make_browser(PAGES, WebSearchRequest(allowed_domains=("moved.example",)))
    browser._cache.put("https://moved.example/", Page("https://elsewhere.example/", "t", "text"))
    _, refused = await drive(browser.call, "browser.open", {"id": "https://moved.example/"})
    assert refused.failed
    browser._backend = OnlineNothing()
    await drive(browser.call, "browser.search", {"query": "x"})
    _, clicked = await drive(browser.call, "browser.open", {"id": 0})
    assert "elsewhere.example is outside the allowed domains" in clicked.content


class OnlineNothing(SearchBackend):
    """A search service that finds one page, which has moved."""

    async def search(self, query: str, topn: int, options: WebSearchRequest) -> list[Hit]:
        return [Hit("https://moved.example/", "Moved", "")]
