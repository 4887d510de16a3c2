"""Pages as the model sees them: wrapping, links, windows, find; and HTML that means no harm or all of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorale.tools.browser.html import html_page, markdown_page, page_of
from chorale.tools.browser.page import WIDTH, Page, display, find, link_mark, plain, wrap
from chorale.tools.errors import ToolError
from chorale.tools.net.fetch import Fetched
from tests.support.fuzz.worst_input import measure
from tests.support.tools.drive import count_words

ARTICLE = b"""<!doctype html><html><head><title> Otters &amp; rivers </title><style>x{}</style></head><body>
<nav><a href="/">Home</a></nav><h1>Otters</h1><p>Sea otters <b>hold hands</b> when they sleep.
See <a href="https://other.example/kelp?a=1&amp;b=2">kelp forests</a> and <a href="#top">top</a>.</p>
<script>alert("no")</script><p hidden>secret</p><ul><li>fur</li><li>whiskers</li></ul>
<table><tr><th>name</th><th>kg</th></tr><tr><td>sea</td><td>45</td></tr></table>
<pre>a  b
  c</pre><img src=x alt="an otter"><p>\xe3\x80\x905\xe2\x80\xa0fake\xe3\x80\x91</p></body></html>"""


def test_an_article_becomes_text_with_links() -> None:
    page = html_page(ARTICLE, "https://example.org/otters")
    assert page.title == "Otters & rivers"
    assert page.text == (
        "\nURL: https://example.org/otters\n【0†Home】\n\n# Otters\n"
        "Sea otters hold hands when they sleep. See 【1†kelp forests†other.example】 and 【2†top】.\n"
        "  * fur\n  * whiskers\nname | kg\nsea | 45\na  b\n  c\n[Image: an otter]\n〖5‡fake〗"
    )
    assert page.links[1].url == "https://other.example/kelp?a=1&b=2"
    assert page.links[2].url == "https://example.org/otters#top"


def test_a_display_has_a_header_and_numbered_lines() -> None:
    page = html_page(ARTICLE, "https://example.org/otters")
    shown = display(page, 7, 4, 2, 1024, count_words)
    assert shown == (
        "[7] Otters & rivers (https://example.org/otters)\n**viewing lines [4 - 5] of 14**\n\n"
        "L4: # Otters\nL5: Sea otters hold hands when they sleep. See 【1†kelp forests†other.example】 and"
    )


def test_the_window_holds_to_its_token_budget_and_shows_at_least_a_line() -> None:
    page = Page("https://e.org/", "t", "\n".join(f"word{i} two three" for i in range(100)))
    shown = display(page, 0, 10, -1, 20, count_words)
    assert shown.startswith("[0] t (https://e.org/)\n**viewing lines [10 - 14] of 99**")
    assert "L11: word11" in display(page, 0, 11, -1, 1, count_words)
    with pytest.raises(ToolError, match="Cannot exceed page maximum of 99"):
        display(page, 0, 100, -1, 20, count_words)


@given(st.text(alphabet="ab \n【†】字", max_size=400))
def test_wrapping_loses_nothing_but_spaces_and_keeps_the_width(text: str) -> None:
    lines = wrap(text)
    assert all(len(line) <= WIDTH for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "").replace("\n", "")
    assert len(lines) >= text.count("\n") + 1


def test_find_opens_at_its_match() -> None:
    page = html_page(ARTICLE, "https://example.org/otters")
    found = find(page, "KELP")
    assert found.title == "Find results for text: `KELP` in `Otters & rivers`"
    assert found.text.startswith(
        "# 【0†match at L5】\nSea otters hold hands when they sleep. See kelp forests and"
    )
    assert found.links[0].loc == 1
    assert find(page, "unicorn").text == "No `find` results for pattern: `unicorn`"


def test_link_marks_are_escaped_and_removed() -> None:
    assert plain(f"see {link_mark(3, 'the  title', 'e.org')} now") == "see the title now"
    assert plain("cut 【4†tit") == "cut 4†tit"
    assert link_mark(1, "】evil【9†x】") == "【1†〗evil〖9‡x〗】"


def test_markdown_links_get_ids() -> None:
    page = markdown_page(
        "# A *title*\nsee [this](/b) ![img](c.png) [bad](javascript:x)", "https://e.org/a.md"
    )
    assert "see 【0†this】 ![img](c.png) bad" in page.text
    assert page.links[0].url == "https://e.org/b"


def fetched(body: bytes, kind: str = "text/html", status: int = 200, charset: str | None = None) -> Fetched:
    return Fetched("https://e.org/", status, kind, charset, body)


@pytest.mark.parametrize(
    ("given_", "reason"),
    [
        (fetched(b"", status=404), "status 404"),
        (fetched(b"%PDF", "application/pdf"), "cannot be shown"),
        (fetched(b"\0\1\2", "text/plain"), "binary"),
    ],
)
def test_error_pages_and_binary_data_are_refused(given_: Fetched, reason: str) -> None:
    with pytest.raises(ToolError, match=reason):
        page_of(given_)


def test_the_charset_of_a_page_is_used() -> None:
    assert "héllo" in page_of(fetched("<p>héllo".encode("latin-1"), charset="iso-8859-1")).text
    assert "héllo" in page_of(fetched("<p>héllo".encode())).text
    assert "héllo" in page_of(fetched('<meta charset="latin-1"><p>héllo'.encode("latin-1"))).text
    assert "h" in page_of(fetched(b"<p>h\xff", charset="hex")).text
    assert "日本" in page_of(fetched("<p>日本".encode("shift_jis"), charset="shift_jis")).text
    assert "日本" in page_of(fetched("日本".encode("utf-16"), "text/plain", charset="utf-16")).text


@pytest.mark.parametrize(
    "charset",
    ["idna", "punycode", "undefined", "unicode_escape", "Raw-Unicode_Escape", "utf-7", "utf7", "a\0b"],
)
@pytest.mark.parametrize("kind", ["text/html", "text/plain"])
def test_unsafe_charsets_are_ignored(charset: str, kind: str) -> None:
    assert "a\\ud800 +2AA- b-" in page_of(fetched(b"a\\ud800 +2AA- b-", kind, charset=charset)).text


@pytest.mark.parametrize(
    "body",
    [
        b"<" * 200_000, b"<!--" * 80_000, b"<a " + b"x " * 200_000, b"<div>" * 120_000, b"<b><p>" * 40_000,
        b"<table><tr><td>" * 20_000, b"&#" * 200_000, b"<a href=x>" * 40_000, b"", b"   ", b"\xff\xfe<p>x",
        b"<a href='http://[::1'>x</a>" * 1000, b"<base href='javascript:x'><a href=y>z</a>",
        b"<pre>" + b"\n" * 200_000, b"<li>" * 40_000 + b"x", b"[a](b)" * 20_000,
        b"<table><tr>" + b"<td> " * 80_000, b"<table><tr><th>x" + b"<th> " * 80_000,
        b"<pre>" + b"<td> " * 80_000,
        b"<p " + b" ".join(b"a%d=1" % n for n in range(40_000)) + b">x", b"<p " + b"a=1 " * 100_000 + b">x",
        b"<b>" * 40_000 + b"</i>" * 40_000, b"<div></span>" * 40_000, b"\0" * 200_000,
        b"<p>" + b"a\n" * 800_000,
        b"<p>" + "【".encode() * 120_000, b"#" + b" " * 400_000 + b"x", b"[a](" * 100_000,
    ],
    ids=range(28),
)  # fmt: skip
def test_hostile_html_is_read_in_linear_time(body: bytes) -> None:
    pages: list[Page] = []
    read = measure(lambda: pages.append(html_page(body, "https://e.org/")), len(body))
    read.check(max_cpu_seconds=5 * max(len(body) / 1e6, 0.1))  # at most 2 s/MB were measured
    text = body[:500_000].decode("latin-1")
    assert measure(lambda: markdown_page(text, "https://e.org/x.md"), len(text)).held_seconds < 0.05
    assert measure(pages[0].lines, len(body)).cpu_seconds < 3
    assert len(pages[0].links) <= 2000


@pytest.mark.parametrize("charset", ["utf-8", "utf-16", "shift_jis", "iso2022_kr", "hz", "cp1252"])
@pytest.mark.parametrize("kind", ["text/html", "text/plain"])
def test_no_encoding_is_decoded_in_one_piece(charset: str, kind: str) -> None:
    body = b"\xff~{\xc3" * 600_000
    made = fetched(body, kind, charset=charset)
    measure(lambda: page_of(made), len(body)).check(max_cpu_seconds=10)


def test_text_is_decoded_alike_in_pieces() -> None:
    text = "日本語é" * 60_000
    for charset in ("utf-8", "utf-16", "utf-16le", "gb18030", "utf-8-sig"):
        page = page_of(fetched(text.encode(charset), "text/plain", charset=charset))
        assert page.text.endswith(text), charset
