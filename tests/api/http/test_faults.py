"""The whole app under invalid bodies and shutdown: status, code and logged stack of each error."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from tests.support.event_loop import until
from tests.support.raw_http import call, connect, read_answer
from tests.support.scripted import scripted
from tests.support.server import served_on_port as served

TEXT = [200005, 17196, 200008, 13225, 11, 1495]  # <|channel|>final<|message|>Hello, ...
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("path", "data", "place"),
    [(CHAT, {**ASK, "model": "nobody"}, "check_model"), ("/v1/models", {}, "starlette")],
)
@pytest.mark.parametrize("wanted", [True, False])
async def test_the_stack_of_an_error_is_logged_if_the_operator_wants_it(
    path: str, data: Any, place: str, wanted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(scripted(TEXT), log_error_stack=wanted) as server:
        await call(server.port, "POST", path, data)
    logged = [record for record in caplog.records if record.exc_info]
    assert len(logged) == wanted
    assert all(place in str(record.exc_text) for record in logged)


INVALID = (
    (b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "json_too_deep"),
    (b'{"messages": "\xff"}', "invalid_utf8"),
    (b"{", "invalid_json"),
    (b'{"temperature": NaN}', "invalid_json"),
)
PATHS = (CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")


async def test_invalid_bodies_are_400_on_every_endpoint() -> None:
    """``test_body.py`` tests more bodies."""
    async with served(scripted(TEXT)) as server:
        for path, (body, code) in itertools.product(PATHS, INVALID):
            answer = await call(server.port, "POST", path, body=body)
            assert (answer.status, answer.code) == (400, code), path


async def test_a_stream_that_outlasts_the_drain_ends_with_done() -> None:
    async with served(scripted(TEXT, hang=True), shutdown_timeout=0.3) as server:
        body = json.dumps({**ASK, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        reader, writer = await connect(server.port)
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: len(server.client.requests) == 1)
        await asyncio.sleep(0.05)
        server.stop()
        answer = await asyncio.wait_for(read_answer(reader), 30)
        assert answer.body.endswith(b"data: [DONE]\n\n")
        await asyncio.wait_for(server.task, 30)
