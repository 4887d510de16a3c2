"""Citation marks: however the text is cut, the pieces joined are the whole, and offsets fit the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chorale.tools.browser.citations import CitationRewriter
from chorale.tools.contract import Link, UrlCitation
from tests.support.tools.drive import cite


def lookup(cursor: int, line: int | None) -> Link | None:
    return Link(f"https://e{cursor}.org/p_(x)", f"Page {cursor}") if cursor < 3 else None


PIECES = st.sampled_from([
    "【", "】", "†", "0", "1", "7", "L4", "-L9", "【0†L1】", "【1†L2-L3】", "【9†L1】", "【2†L1†e.org】", "a",
    " ", "字", "【【", "x" * 90,
])  # fmt: skip


@given(st.lists(PIECES, max_size=12).map("".join), st.data())
def test_chunked_is_whole(text: str, data: st.DataObject) -> None:
    whole, citations = cite(CitationRewriter(lookup), text)
    stream = CitationRewriter(lookup)
    pieces = []
    while text:
        size = data.draw(st.integers(1, len(text)))
        pieces += stream.feed(text[:size])
        text = text[size:]
    pieces += stream.finish()
    assert "".join(piece.text for piece in pieces) == whole
    assert tuple(piece.citation for piece in pieces if piece.citation) == citations
    for citation in citations:
        number = citation.url[9]
        domain = f"e{number}.org"
        shown = whole[citation.start_index : citation.end_index]
        assert shown == f" ([{domain}](https://{domain}/p_%28x%29)) "


def test_a_mark_is_held_back_until_it_is_closed_and_no_longer() -> None:
    stream = CitationRewriter(lookup)
    assert [p.text for p in stream.feed("see 【1†L")] == ["see "]
    assert stream.feed("4") == []
    done = stream.feed("】 more")
    assert done[0].citation == UrlCitation(4, 42, "https://e1.org/p_(x)", "Page 1")
    assert done[1].text == " more"
    assert [p.text for p in stream.feed("【12 no")] == ["【12 no"]
    assert stream.feed("【1†" + "y" * 200) == []
    assert "".join(p.text for p in stream.feed("y" * 100)).startswith("【1†y")
    assert "".join(p.text for p in stream.finish()) == ""


def test_a_mark_of_a_page_without_an_address_stays() -> None:
    """Of a page that came from another version's state, for example."""
    rewriter = CitationRewriter(lambda cursor, line: Link("", "nowhere"))
    pieces = [*rewriter.feed("so【0†L1】 it is"), *rewriter.finish()]
    assert "".join(piece.text for piece in pieces) == "so【0†L1】 it is"
    assert all(piece.citation is None for piece in pieces)
