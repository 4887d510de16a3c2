"""JSON that somebody else wrote: read as json reads it, but for what UTF-8 cannot hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorale.harmony.json_text import MAX_DEPTH, loads

TEXT = st.text(st.characters())  # surrogates too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_parsed_json_can_be_encoded_again(value: Any) -> None:
    written = json.dumps(value)
    for text in (written, written.encode()):
        json.dumps(loads(text), ensure_ascii=False).encode()


@given(st.recursive(st.integers() | st.text(), st.lists, max_leaves=10))
def test_valid_text_is_parsed_as_by_json_loads(value: Any) -> None:
    assert loads(json.dumps(value)) == value


def test_a_lone_surrogate_becomes_one_replacement() -> None:
    assert loads('{"\\ud800": ["a\\udc00b", "\\ud83d\\ude00"]}') == {"\ufffd": ["a\ufffdb", "\U0001f600"]}
    with pytest.raises(ValueError, match="control character"):
        loads('"a\nb"')
    assert loads('"a\nb"', strict=False) == "a\nb"


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"a": v}, lambda v: ["[{", {"a": 0, "b": [v]}]])
def test_nesting_has_a_bound_far_below_the_interpreters(wrap: Any) -> None:
    value: Any = 0
    per_level = json.dumps(wrap(0)).count("]") + json.dumps(wrap(0)).count("}")
    depth = 0
    while depth + per_level <= MAX_DEPTH:
        value, depth = wrap(value), depth + per_level
    assert loads(json.dumps(value)) == value
    assert loads(json.dumps(value), max_depth=depth) == value
    for text in (json.dumps(value), json.dumps(value).encode()):
        with pytest.raises(ValueError, match="nested more than"):
            loads(text, max_depth=depth - 1)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 950, 1000, 5000, 100_000])
def test_json_that_is_too_deep_is_refused_as_a_whole(depth: int) -> None:
    for text in ("[" * depth + "]" * depth, '{"a":' * depth + "0" + "}" * depth):
        with pytest.raises((ValueError, RecursionError)):
            loads(text)
    assert loads("[" + "[]," * depth + "[]]") == [[]] * (depth + 1)
