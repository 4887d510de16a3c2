"""Request bodies: the error code of each fault, and limits that apply before parsing."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from chorale.api.http.body import parse_model, parse_object
from chorale.errors import RequestError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{}"\\aé'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[{"\\x'), inner, max_size=3),
    max_leaves=20,
)


@given(JSON)
@settings(max_examples=100, deadline=None)
def test_valid_bodies_are_parsed_like_json_loads(value: Any) -> None:
    assert parse_object(json.dumps({"value": value}).encode(), 100) == {"value": value}


def test_a_lone_surrogate_is_refused() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}', 9) == {"a": "\U0001f600"}
    for half in (b'"\\ud800"', b'"\\udc00x"', b'{"\\ud800": 1}'):
        with pytest.raises(RequestError):
            parse_object(b'{"a": %s}' % half, 9)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": -Infinity}', "invalid_json"),
        (b'{"a": 1e999}', "invalid_json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"a": "\\udc00\\ud800"}', "invalid_json"),
        (b'{"a": 1, "a": 1}', "invalid_json"),
        (b'{"a": [{"b": 1, "b": 2}]}', "invalid_json"),
        (b'{"a": "\xff"}', "invalid_utf8"),
        (b'{"a": "\xed\xa0\x80"}', "invalid_utf8"),  # a surrogate encoded as UTF-8
        (b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "json_too_deep"),
        (b"[" * 5_000_000, "json_too_deep"),
        (b'{"a":' * 100_000, "json_too_deep"),
        (b'{"a": "unfinished', "invalid_json"),
    ],
)
def test_invalid_bodies_are_refused_quickly_with_their_code(raw: bytes, code: str) -> None:
    began = time.thread_time()
    with pytest.raises(RequestError) as caught:
        parse_object(raw, 64)
    assert caught.value.status == 400
    assert caught.value.code == code
    assert time.thread_time() - began < 2  # CPU seconds, independent of other processes


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    content: str | list[Part]
    flag: bool = False


@pytest.mark.parametrize(
    ("data", "param", "code"),
    [
        ({}, "content", "missing_required_parameter"),
        ({"content": 1}, "content", "invalid_type"),
        ({"content": "x", "flag": "yes"}, "flag", "invalid_type"),
        ({"content": "x", "other": 1}, "other", "unknown_parameter"),
        ({"content": [{"type": "text"}]}, "content[0].text", "missing_required_parameter"),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "b", "text": ""}]},
            "content[1].type",
            "invalid_value",
        ),
    ],
)
def test_param_is_the_path_in_the_body(data: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_model(Model, data)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_the_message_names_all_faults() -> None:
    with pytest.raises(RequestError, match=r"content: .*; flag: .*"):
        parse_model(Model, {"content": 1, "flag": 1})


def test_long_and_many_keys_do_not_make_the_message_long() -> None:
    with pytest.raises(RequestError) as caught:
        parse_model(Model, {"content": "", **{"k" * 10_000 + str(index): 1 for index in range(1000)}})
    assert len(caught.value.message) < 2000
