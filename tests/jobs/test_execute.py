"""Lines sent to the app without a socket, or to a server: retries, their limits, and records of answers.

``tests/api/batches/test_flow.py`` tests answers, errors, owners and cancelled lines of batches.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from chorale.config.engine import hash_key
from chorale.errors import EngineDeadError, QueueFullError
from chorale.jobs.execute import AppSender, LineRetries, UrlSender, execute, one_line
from chorale.jobs.line import Answer, Line
from chorale.requests.openai_client import AsyncClient, Endpoint, NoAnswerError
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.server import served

HELLO = (200005, 17196, 200008, 13225, 200002)
QUICK = LineRetries(patience=5.0, first_delay=0.01, longest_delay=0.02)


def line(custom_id: str = "a", url: str = "/v1/chat/completions", **body: Any) -> Line:
    if not body:
        body = {"messages": [{"role": "user", "content": "hi"}]}
    return Line(custom_id, url, json.dumps(body).encode())


@pytest.mark.parametrize("error", [QueueFullError("full", retry_after=0.01), EngineDeadError("restarting")])
async def test_requests_to_busy_servers_are_retried(error: Any) -> None:
    client = ScriptedClient(
        lambda request, index: Script((), error=error) if len(client.requests) < 2 else Script(HELLO)
    )
    async with served(client) as server:
        record = await execute(line(), AppSender(server.app), QUICK)
        assert record.ok
        assert len(client.requests) == 2


async def test_retries_end_with_the_patience() -> None:
    async def silent(asked: Line) -> Answer:
        raise NoAnswerError("nobody is there")

    async def busy(asked: Line) -> Answer:
        return Answer(503, "r", b"{}")

    short = LineRetries(patience=0.05, first_delay=0.01, longest_delay=0.01)
    record: Any = await execute(line(), silent, short)
    assert record.answer is None
    assert record.fault.code == "no_answer"
    record = await execute(line(), busy, short)
    assert record.answer.status == 503


RESTARTED = b'{"error": {"code": "engine_restarted"}}'


@pytest.mark.parametrize(
    ("answer", "most", "count"),
    [
        (Answer(500, "r", b"{}"), {}, 1),  # recorded like any other answer
        (Answer(500, "r", b"{}"), {"max_errors": 3}, 3),
        (Answer(503, "r", RESTARTED), {"max_errors": 3, "max_crashes": 5}, 5),
        (Answer(400, "r", RESTARTED), {"max_crashes": 5}, 1),
        (Answer(503, "r", RESTARTED), {"attempts": 2}, 2),
        (None, {"max_errors": 3}, 3),
    ],
)
async def test_attempts_are_limited(answer: Answer | None, most: dict[str, Any], count: int) -> None:
    sent = num_ready = 0

    async def send(asked: Line) -> Answer:
        nonlocal sent
        sent += 1
        if answer is None:
            raise NoAnswerError("nobody is there")
        return answer

    async def ready() -> None:
        nonlocal num_ready
        num_ready += 1

    retries = LineRetries(first_delay=0.001, longest_delay=0.001, **most)
    record = await execute(line(), send, retries, ready)
    assert (sent, num_ready, record.answer) == (count, count, answer)


async def test_an_incomplete_answer_is_an_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})

    with pytest.raises(NoAnswerError):
        await AppSender(app)(line())


async def test_a_url_sender_posts_over_http() -> None:
    async with served(keys=[hash_key("secret")]) as server:
        transport = httpx2.ASGITransport(server.app)
        async with AsyncClient(Endpoint("http://localhost", "secret"), transport=transport) as client:
            answer = await UrlSender(client)(line())
        assert answer.status == 200
        assert answer.request_id.startswith("req_")
    async with AsyncClient(Endpoint("http://127.0.0.1:9")) as gone:
        with pytest.raises(NoAnswerError, match="no answer from"):
            await UrlSender(gone)(line())


def test_a_body_becomes_one_line_of_json() -> None:
    assert one_line(b'{"a":1}') == b'{"a":1}'
    assert json.loads(one_line(b'{\n "a": "x\\ny"\r\n}')) == {"a": "x\ny"}
    for end in (b"\n", b"\r", b"\r\n"):
        assert one_line(b"{" + end + b'"a": "x\\ny"}') == b'{"a":"x\\ny"}'
    assert json.loads(one_line(b"<html>\n\xff")) == "<html>\n\ufffd"
    assert json.loads(one_line(b"")) == ""
