"""Counts of a JSON body, taken from its bytes, are those of the value; what is above a limit is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorale.api.http.body import parse_object
from chorale.api.limits import SIZES
from chorale.errors import RequestError
from chorale.harmony import json_shape
from chorale.harmony.json_shape import Shape, shape_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{},:"\\aé'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('[{"\\:,x'), inner, max_size=4),
    max_leaves=30,
)
NO_LIMIT = Shape(*[10**9] * 4, members=0, escapes=10**9)  # members are always counted
# Those above a limit each, by one; and the fullest bodies that are allowed.
TOO_LARGE = {
    "json_members": lambda n: {str(number): 0 for number in range(n)},
    "json_containers": lambda n: [{}] * (n - 1),
    "json_strings": lambda n: ["a"] * (n - 1),
    "json_values": lambda n: [1] * (n - 2),
    "json_escapes": lambda n: '\n\\"' * (n // 3) + "\n" * (n % 3),
}


def counted(value: Any) -> Shape:
    """The same by walking the value."""
    found = Shape(values=1, strings=int(isinstance(value, str)))
    if not isinstance(value, list | dict):
        return found
    found.containers, found.values = 1, 1 + (not value)  # an empty container counts twice
    if isinstance(value, dict):
        found.members, found.strings = len(value), len(value)
    for inner in value.values() if isinstance(value, dict) else value:
        shape = counted(inner)
        found.depth = max(found.depth, shape.depth)
        found.members = max(found.members, shape.members)
        for name in ("values", "strings", "containers"):
            setattr(found, name, getattr(found, name) + getattr(shape, name))
    found.depth += 1
    return found


@pytest.mark.parametrize("size", [1, 7, 262_144])
@settings(max_examples=80, deadline=None)
@given(value=JSON, escape=st.booleans())
def test_counts_are_those_of_the_value(size: int, value: Any, escape: bool) -> None:
    raw = json.dumps(value, ensure_ascii=escape).encode()
    before, json_shape._SLICE = json_shape._SLICE, size
    try:
        escapes = len(re.findall(rb'\\(?:["\\/bfnrt]|u[0-9a-f]{4})', raw))
        assert shape_of(raw, NO_LIMIT) == replace(counted(value), escapes=escapes)
    finally:
        json_shape._SLICE = before


def test_marks_within_strings_do_not_count_across_slices() -> None:
    deep = b"[" * 70_000 + b"]" * 70_000
    raw = b'{"a": "' + b'\\"[,:' * 170_000 + b'", "b": ' + deep + b"}"
    found = shape_of(raw, NO_LIMIT)
    assert (found.depth, found.containers, found.strings, found.members) == (70_001, 70_001, 3, 2)


def test_counting_stops_at_the_first_slice_that_is_too_much() -> None:
    raw = b"[" + b"1," * 2**22
    assert shape_of(raw, Shape(64, 1000, 1000, 1000, 1000)).values < 2**18


@pytest.mark.parametrize("name", TOO_LARGE)
def test_the_limit_is_allowed_and_one_more_is_refused(name: str) -> None:
    most = SIZES[name].max
    field = "a"
    # The body itself is a value, a container and a string (the field's name).
    around = {"json_containers": 1}.get(name, 0)
    raw = json.dumps({field: TOO_LARGE[name](most - around)}).encode()
    assert len(parse_object(raw, 64)[field]) > most // 2
    raw = json.dumps({field: TOO_LARGE[name](most - around + 1)}).encode()
    with pytest.raises(RequestError) as caught:
        parse_object(raw, 64)
    assert (caught.value.status, caught.value.code) == (400, "json_too_large")
    assert str(most) in str(caught.value)


def test_real_requests_stay_far_below_the_limits() -> None:
    """The largest that a client of a 131,072-token model may mean."""
    part = [{"type": "text", "text": "x"}]
    chat = {"messages": [{"role": "user", "content": part}] * 16_384}
    bodies = [
        chat,
        {"prompt": [201_087] * 131_072, "logit_bias": {str(i): 1 for i in range(1024)}},
        {"prompt": "x", "allowed_token_ids": list(range(201_088)), "stop_token_ids": list(range(256))},
        {"tools": [{"function": {"parameters": {"enum": ["word"] * 1000}}}] * 128},
    ]
    for body in bodies:
        assert parse_object(json.dumps(body).encode(), 64).keys() == body.keys()
