"""JSON that somebody else wrote: read as json reads it, but for what UTF-8 cannot hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorale.harmony.json_text import loads

TEXT = st.text(st.characters())  # surrogates too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_it_can_be_written_again(value: Any) -> None:
    written = json.dumps(value)
    for text in (written, written.encode()):
        json.dumps(loads(text), ensure_ascii=False).encode()


@given(st.recursive(st.integers() | st.text(), st.lists, max_leaves=10))
def test_what_is_whole_is_read_as_json_reads_it(value: Any) -> None:
    assert loads(json.dumps(value)) == value


def test_half_a_pair_becomes_one_replacement() -> None:
    assert loads('{"\\ud800": ["a\\udc00b", "\\ud83d\\ude00"]}') == {"\ufffd": ["a\ufffdb", "\U0001f600"]}
    with pytest.raises(ValueError, match="control character"):
        loads('"a\nb"')
    assert loads('"a\nb"', strict=False) == "a\nb"
