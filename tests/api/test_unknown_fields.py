"""Unknown request fields: ignored and named by default, refused with --unknown-fields refuse."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from chorale.api.openapi import describe
from chorale.api.operations import OPERATIONS
from chorale.tracing import ignored
from tests.api.batches.test_flow import batched, created, ended, line, records
from tests.api.responses.websocket.test_websocket import opened, send
from tests.api.responses.websocket.test_websocket import served as socket_served
from tests.api.test_app import served
from tests.support.raw_http import call

NAME = "x-chorale-ignored-fields"
MESSAGES = [{"role": "user", "content": "Hi"}]
ASKED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "usage": {"include": True}}, "usage"),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs.enable_thinking",
    ),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "stream": True, "stream_options": {"a": 1}, "reasoning": {"exclude": True}},
        "stream_options.a, reasoning.exclude",
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "b": 1}},
        },
        "response_format.json_schema.b",
    ),
    ("/v1/completions", {"prompt": "Hi", "num_ctx": 4096}, "num_ctx"),
    ("/v1/responses", {"input": "Hi", "num_ctx": 1, "text": {"x": 1, "y": 2}}, "num_ctx, text.x, text.y"),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9, "think": True}, "think"),
    (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 9, "thinking": {"type": "disabled", "x": 1}},
        "thinking.x",
    ),
    ("/v1/conversations", {"colour": "red"}, "colour"),
    ("/tokenize", {"prompt": "Hi", "é, b\n": 1}, "%C3%A9%2C%20b%0A"),
]


@pytest.mark.parametrize("unknown_fields", ["warn", "refuse"])
@pytest.mark.parametrize(("path", "data", "named"), ASKED)
async def test_an_unknown_field_is_ignored_and_named_or_refused(
    path: str, data: dict[str, Any], named: str, unknown_fields: str
) -> None:
    async with served(unknown_fields=unknown_fields) as server:
        answer = await call(server.port, "POST", path, data)
        if unknown_fields == "warn":
            assert (answer.status, answer.headers[NAME]) == (200, named)
        else:
            assert (answer.status, answer.headers.get(NAME)) == (400, None)
            assert answer.json["error"]["message"].startswith("unknown parameter '")


async def test_fields_that_are_refused_by_name_stay_errors_and_the_rest_is_named() -> None:
    async with served() as server:
        data = {"messages": MESSAGES, "num_ctx": 1, "suffix": "x", "chat_template": "{{ x }}"}
        answer = await call(server.port, "POST", "/v1/chat/completions", data)
        assert (answer.status, answer.json["error"]["param"]) == (400, "chat_template")
        assert answer.headers[NAME] == "num_ctx, suffix"
        plain = await call(server.port, "POST", "/v1/chat/completions", {"messages": MESSAGES})
        assert NAME not in plain.headers


async def test_the_header_is_bounded_and_pages_of_other_origins_can_read_it() -> None:
    async with served(allowed_origins=("https://a.example",)) as server:
        data = {"messages": MESSAGES} | {f"f{number}": 1 for number in range(30)}
        origin = {"origin": "https://a.example"}
        answer = await call(server.port, "POST", "/v1/chat/completions", data, origin)
        assert answer.headers[NAME] == ", ".join(f"f{number}" for number in range(20))
        assert NAME in answer.headers["access-control-expose-headers"]
        long = {"messages": MESSAGES} | {f"{number}" + "é" * 300: 1 for number in range(9)}
        named = (await call(server.port, "POST", "/v1/chat/completions", long)).headers[NAME]
        assert len(named) <= 1100
        assert named.endswith(", ...")


async def test_the_log_names_a_field_once_and_remembers_a_bounded_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ignored, "_logged", set())
    monkeypatch.setattr(ignored, "_MOST_LOGGED", 3)
    with caplog.at_level(logging.WARNING, ignored.__name__):
        async with served() as server:
            for name in ("max_tokenz", "max_tokenz", "b", "c", "d", "e"):
                await call(server.port, "POST", "/tokenize", {"messages": MESSAGES, name: 1})
    lines = [record.getMessage() for record in caplog.records if record.name == ignored.__name__]
    assert len(lines) == 3
    assert "did you mean 'max_tokens'?" in lines[0]


async def test_the_first_websocket_event_names_unknown_fields() -> None:
    async with socket_served() as server, opened(server) as connection:
        for fields, warned in (({"num_ctx": 1, "reasoning": {"x": 1}}, ["num_ctx", "reasoning.x"]), ({}, [])):
            await send(connection, **fields)
            events = []
            while not events or events[-1]["type"] != "response.completed":
                events.append(json.loads(await connection.recv()))
            expected = [f"unknown parameter '{name}' was ignored" for name in warned]
            assert events[0].get("warnings", []) == expected
            assert not any("warnings" in event for event in events[1:])


async def test_the_output_of_a_batch_line_names_unknown_fields(tmp_path: Path) -> None:
    async with batched(tmp_path) as server:
        done = await ended(server, await created(server, line(1, messages=MESSAGES, num_ctx=1), line(2)))
        first, second = sorted(await records(server, done.output_file_id), key=lambda one: one["custom_id"])
        assert first["warnings"] == ["unknown parameter 'num_ctx' was ignored"]
        assert "warnings" not in second


def test_the_openapi_document_allows_unknown_fields_unless_refused() -> None:
    assert '"additionalProperties": false' not in json.dumps(describe(OPERATIONS))
    assert (
        describe(OPERATIONS, refuses=True)["components"]["schemas"]["ChatRequest"]["additionalProperties"]
        is False
    )
