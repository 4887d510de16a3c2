"""Incremental decoding and stop strings: the pieces add up, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorale.harmony.text import StopStrings


def run(stops: list[str], pieces: list[str], include: bool) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include)
    shown, matched = "", None
    for piece in pieces:
        text, matched = matcher.feed(piece)
        shown += text
    return shown + matcher.flush(), matched


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["END"], "hello END more", "hello ", "END"),
        (["END"], "hello EN", "hello EN", None),
        (["b", "abc"], "abc", "a", "b"),  # ends first
        (["bc", "abc"], "abc", "", "abc"),  # ends at the same place, longer
        (["aab"], "aaab", "a", "aab"),  # overlaps itself
        (["\n\n", "日本"], "x\n日本", "x\n", "日本"),
        ([], "anything", "anything", None),
        (["", "."], "a.b", "a", "."),
    ],
)
def test_stop_strings(stops: list[str], text: str, shown: str, matched: str | None) -> None:
    for pieces in ([text], list(text)):
        assert run(stops, pieces, False) == (shown, matched)
        assert run(stops, pieces, True) == (shown + (matched or ""), matched)


@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("ab\nc", max_size=5), max_size=6),
    st.lists(st.text("ab\nc", max_size=5), max_size=6),
    st.booleans(),
)
def test_a_stop_string_that_ends_in_passed_over_text_is_ignored(
    stops: list[str], early: list[str], late: list[str], include: bool
) -> None:
    matcher = StopStrings(stops, include)
    shown, matched = "".join(map(matcher.pass_over, early)), None
    for piece in late:
        more, matched = matcher.feed(piece)
        shown += more
    shown += matcher.flush()
    text, passed = "".join([*early, *late]), len("".join(early))
    ends = [end for end in range(passed + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    assert (matched is not None) == bool(ends)
    cut = 0 if include else len(matched or "")
    assert shown == (text[: ends[0] - cut] if ends else text)


def test_nothing_that_could_begin_a_stop_is_shown_early() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.feed("a S") == ("a ", None)
    assert matcher.feed("TO") == ("", None)
    assert matcher.feed("x") == ("STOx", None)
    assert matcher.feed("STOP") == ("", "STOP")
    assert matcher.feed("after") == ("", "STOP")
    assert matcher.flush() == ""
