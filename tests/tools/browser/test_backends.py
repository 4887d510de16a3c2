"""Each search service is asked as its documentation says, and its answer is read; bad answers are faults."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from chorale.errors import ConfigError
from chorale.tools.browser.backends import SERVICES, Hit, HttpSearch
from chorale.tools.browser.offline import load_folder
from chorale.tools.contract import WebSearchRequest
from chorale.tools.errors import ToolError
from chorale.tools.net.addresses import AddressPolicy
from chorale.tools.net.fetch import Fetcher, FetchLimits
from tests.support.tools.local_http import Handler, answer, serve

RECORD = {"url": "https://a.example/x", "title": "A &amp; <b>B</b>", "content": "one  <b>two</b> &lt;i&gt;"}
ANSWERS: dict[str, Any] = {
    "searxng": {"results": [RECORD, {"url": "ftp://no"}, {"title": "no url"}, RECORD]},
    "exa": {"results": [RECORD | {"text": RECORD["content"]}]},
    "you": {"results": {"web": [RECORD | {"description": RECORD["content"], "snippets": []}], "news": []}},
    "brave": {"web": {"results": [RECORD | {"description": RECORD["content"]}]}},
    "tavily": {"results": [RECORD]},
}
KEY_HEADER = {
    "exa": "x-api-key", "you": "x-api-key", "brave": "x-subscription-token", "tavily": "authorization",
}  # fmt: skip


async def ask(
    name: str, handler: Handler, options: WebSearchRequest | None = None, topn: int = 5
) -> list[Hit]:
    async with serve({"/search": handler}) as port:
        fetcher = Fetcher(AddressPolicy(allow_private=True), FetchLimits(seconds=3))
        backend = HttpSearch(SERVICES[name], fetcher, "k3y", f"http://127.0.0.1:{port}/search")
        try:
            return await backend.search("sea otters", topn, options or WebSearchRequest())
        finally:
            await fetcher.aclose()


@pytest.mark.parametrize("name", SERVICES)
async def test_each_service_gets_its_request_and_returns_hits(name: str) -> None:
    heads: list[str] = []
    reply = answer(body=json.dumps(ANSWERS[name]).encode(), content_type="application/json")

    async def handler(writer: asyncio.StreamWriter, head: bytes) -> None:
        heads.append(head.decode().lower())
        await reply(writer, head)

    hits = await ask(name, handler, WebSearchRequest(allowed_domains=("a.example",)))
    assert hits == [Hit("https://a.example/x", "A & B", "one two <i>")]
    if name in KEY_HEADER:
        assert f"{KEY_HEADER[name]}: " in heads[0]
        assert "k3y" in heads[0]
    if heads[0].startswith("get"):
        query = parse_qs(urlsplit(heads[0].split(" ")[1]).query)
        assert "sea otters (site:a.example)" in (query.get("q") or query.get("query") or [""])


@pytest.mark.parametrize(
    ("place", "sent"), [("Paris, FR", True), ("fr", True), ("Paris, France", False), (None, False)]
)
async def test_the_country_of_a_location_is_sent(place: str | None, sent: bool) -> None:
    heads: list[str] = []

    async def handler(writer: asyncio.StreamWriter, head: bytes) -> None:
        heads.append(head.decode())
        await answer(body=b"{}")(writer, head)

    for name in ("you", "brave"):
        await ask(name, handler, WebSearchRequest(user_location=place))
    assert [("country=FR" in head) for head in heads] == [sent, sent]


@pytest.mark.parametrize("name", SERVICES)
async def test_domains_hold_although_the_service_ignores_them(name: str) -> None:
    reply = answer(body=json.dumps(ANSWERS[name]).encode())
    assert await ask(name, reply, WebSearchRequest(allowed_domains=("b.example",))) == []


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize(
    "body",
    ["null", "[]", '{"results": 3}', '{"results": [1, null]}', '{"web": []}', '{"results": {"web": null}}'],
)
async def test_odd_answers_give_no_hits(name: str, body: str) -> None:
    assert await ask(name, answer(body=body.encode())) == []


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (answer("403 Forbidden", b"bad key k3y"), "status 403"),
        (answer(body=b"<html>"), "not JSON"),
        (answer("302 Found", location="http://127.0.0.1/"), "redirect"),
    ],
)
async def test_errors_do_not_reveal_the_key(handler: Handler, reason: str) -> None:
    with pytest.raises(ToolError, match=reason) as caught:
        await ask("exa", handler)
    assert "k3y" not in caught.value.message


async def test_a_folder_of_pages_can_be_searched(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text(
        "<link rel=canonical href='https://a.example/'><title>A</title><p>red otter"
    )
    (tmp_path / "sub" / "b c.md").write_text("---\nurl: https://b.example/x\n---\n# Blue\nblue otter otter")
    (tmp_path / "c.txt").write_text("green whale")
    (tmp_path / "ignored.bin").write_bytes(b"\0otter")
    pages = load_folder(tmp_path)

    found = await pages.search("the otter", 5, WebSearchRequest())
    assert [(hit.url, hit.title) for hit in found] == [
        ("https://b.example/x", "Blue"),
        ("https://a.example/", "A"),
    ]
    assert found[0].snippet == "Blue blue otter otter"
    assert await pages.search("giraffe", 5, WebSearchRequest()) == []
    page = await pages.page("https://a.example#part")
    assert page is not None
    assert (await pages.search("whale", 5, WebSearchRequest()))[0].url == "https://offline.invalid/c.txt"

    assert len(pages) == 3


async def test_a_word_counts_less_in_a_page_that_is_longer_than_most(tmp_path: Path) -> None:
    texts = ["otter" + " sea" * 199, "otter otter" + " sea" * 498, *["kelp " * 100] * 8]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    found = await load_folder(tmp_path).search("otter", 5, WebSearchRequest())
    assert [hit.url[-5:] for hit in found] == ["0.txt", "1.txt"]


def test_missing_and_invalid_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_folder(tmp_path / "none")
    with pytest.raises(ConfigError, match="contains no"):
        load_folder(tmp_path)
    (tmp_path / "a.md").write_text("---\nurl: file:///etc/passwd\n---\nx")
    with pytest.raises(ConfigError, match=r"a\.md"):
        load_folder(tmp_path)
