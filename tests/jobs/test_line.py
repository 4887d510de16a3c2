"""Lines of a batch: accepted lines, the error codes of refused lines, and records."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chorale.errors import EngineDeadError
from chorale.jobs.line import (
    MAX_CUSTOM_ID,
    Answer,
    LineError,
    Record,
    parse_line,
    refused,
)
from tests.support.fuzz.worst_input import measure

BODY = {"model": "demo", "prompt": "ü"}


def line(**changes: Any) -> bytes:
    made = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY} | changes
    return json.dumps({name: value for name, value in made.items() if value is not ...}).encode()


def test_a_body_is_kept_byte_for_byte() -> None:
    body = b'{"prompt" : "\\u00fc", "n":1.50, "model":"m"}'
    raw = b'{"body": ' + body + b' ,"custom_id":"x","method":"POST","url":"/v1/completions"}'
    found = parse_line(raw)
    assert found.body == body
    assert (found.custom_id, found.url, found.model) == ("x", "/v1/completions", "m")


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("extra", [{}, {"stream": False}, {"stream": None, "background": False}])
def test_valid_lines_are_accepted(url: str, extra: dict[str, Any]) -> None:
    assert json.loads(parse_line(line(url=url, body=BODY | extra)).body) == BODY | extra


@pytest.mark.parametrize(
    ("raw", "code", "custom_id"),
    [
        (b"", "invalid_json_line", None),
        (b"{", "invalid_json_line", None),
        (b'"text"', "invalid_json_line", None),
        (b"\xff\xfe{}", "invalid_json_line", None),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", None),
        (b'{"custom_id": "a", "x": ' + b"[" * 30_000, "invalid_json_line", None),
        (b'{"custom_id": NaN}', "invalid_json_line", None),
        (line() + b"}", "invalid_json_line", None),
        (line(custom_id=...), "missing_required_parameter", None),
        (line(method=...), "missing_required_parameter", "a"),
        (line(url=...), "missing_required_parameter", "a"),
        (line(body=...), "missing_required_parameter", "a"),
        (line(custom_id=7), "invalid_type", None),
        (line(custom_id=""), "invalid_line", ""),
        (line(custom_id="x" * (MAX_CUSTOM_ID + 1)), "invalid_line", "x" * (MAX_CUSTOM_ID + 1)),
        (line(method="GET"), "invalid_line", "a"),
        (line(url="/v1/embeddings"), "invalid_url", "a"),
        (line(url="/v1/chat/completions/"), "invalid_url", "a"),
        (line(url=["/v1/completions"]), "invalid_type", "a"),
        (line(body=[1]), "invalid_type", "a"),
        (line(body=BODY | {"stream": True}), "unsupported_value", "a"),
        (line(body=BODY | {"stream": "yes"}), "unsupported_value", "a"),
        (line(body=BODY | {"background": True}), "unsupported_value", "a"),
    ],
)
def test_invalid_lines_are_refused(raw: bytes, code: str, custom_id: str | None) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(raw)
    assert (caught.value.code, caught.value.custom_id) == (code, custom_id)
    record = json.loads(refused(caught.value).encode())
    assert record["error"] == {"code": code, "message": caught.value.message}
    assert record["custom_id"] == custom_id
    assert record["response"]["status_code"] == 400
    assert record["response"]["body"] is None


def test_the_size_of_a_line_is_limited() -> None:
    raw = line(body={"prompt": "x" * 1000})
    assert parse_line(raw, max_bytes=len(raw)).custom_id == "a"
    with pytest.raises(LineError, match="larger than"):
        parse_line(raw, max_bytes=len(raw) - 1)


def test_records_have_the_format_of_openai() -> None:
    made = Record("a", Answer(200, "req_1", b'{"x": [1]}'))
    found = json.loads(made.encode())
    assert made.ok
    assert found.pop("id").startswith("batch_req_")
    assert found == {
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req_1", "body": {"x": [1]}},
        "error": None,
    }
    failed = Record("a", fault=EngineDeadError("gone"))
    assert not failed.ok
    assert json.loads(failed.encode()) | {"id": ""} == {
        "id": "",
        "custom_id": "a",
        "response": None,
        "error": {"code": "engine_restarted", "message": "gone"},
    }


def test_an_answer_is_ok_if_its_status_is_2xx() -> None:
    assert [Answer(status, "r", b"{}").ok for status in (199, 200, 299, 300)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("start", "pattern", "end"),
    [
        (b'{"custom_id":[', b"{},", b"{}]}"),
        (b'{"custom_id":{', b'"k":1,', b'"k":1}}'),
        (b'{"body":{"model":[', b"0,", b"0]}}"),
        (b"[", b'"",', b'""]'),
        (b"{", b'"body":1,', b'"url":1}'),
    ],
)
def test_values_of_a_line_are_counted_before_it_is_parsed(start: bytes, pattern: bytes, end: bytes) -> None:
    raw = start + pattern * (15 * 2**20 // len(pattern)) + end

    def parse() -> None:
        with pytest.raises(LineError) as caught:
            parse_line(raw)
        assert caught.value.code == "json_too_large"

    measure(parse, len(raw)).check(max_cpu_seconds=0.3)
