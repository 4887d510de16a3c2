"""EventStream and until_disconnect against a simulated ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from chorale.api.http.responses import EventStream, until_disconnect
from chorale.api.http.sse import DONE, last_error
from chorale.api.http.stream import KEEP_ALIVE
from chorale.errors import QueueFullError
from tests.support.raw_http import call
from tests.support.scripted import scripted
from tests.support.server import served


class Wire:
    """Records what is sent; the client stays until ``leave`` is set."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.leave = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def play(self, stream: EventStream, keep_alive: float = 0) -> None:
        await stream({"type": "http", KEEP_ALIVE: keep_alive}, self.receive, self.send)


async def count_to(number: int) -> AsyncGenerator[bytes]:
    for index in range(number):
        yield b"%d;" % index


async def test_a_disconnect_while_a_chunk_is_sent_closes_the_source() -> None:
    """The source then waits at its ``yield``, where no cancellation reaches it."""
    closed = False

    async def source() -> AsyncGenerator[bytes]:
        nonlocal closed
        try:
            yield b"1;"
            yield b"2;"
        finally:
            closed = True

    wire = Wire()

    async def send(message: Any) -> None:
        if message.get("body") == b"2;":
            wire.leave.set()
            await asyncio.Event().wait()

    await EventStream(source())({"type": "http"}, wire.receive, send)
    assert closed


async def test_no_comment_is_sent_while_a_chunk_is_being_sent() -> None:
    wire, others = Wire(), []

    async def send(message: Any) -> None:
        others.append(message)
        if message.get("body") == b"0;":
            await asyncio.sleep(0.3)
            assert others[-1] is message, "two messages at once"

    await EventStream(count_to(1))({"type": "http", KEEP_ALIVE: 0.04}, wire.receive, send)
    assert len([each for each in others if not each.get("body", b"").startswith(b":")]) == 3


async def test_comments_are_sent_only_during_silence() -> None:
    wire = Wire()

    async def source() -> AsyncGenerator[bytes]:
        yield b"first"
        await asyncio.sleep(0.25)
        for _ in range(20):
            await asyncio.sleep(0.001)
            yield b"t"

    await wire.play(EventStream(source()), 0.2)
    body = wire.body.replace(b": keep-alive\n\n", b"#")
    assert b"first#" in body
    assert body.count(b"#") <= 3
    assert body.endswith(b"t" * 10)  # no comment between frequent tokens


async def test_silence_before_the_first_chunk_starts_the_stream() -> None:
    """A prompt may take minutes, longer than timeouts of clients and proxies. A later error is an event."""

    async def answering() -> AsyncGenerator[bytes]:
        await asyncio.sleep(0.3)
        yield b"first"

    async def failing() -> AsyncGenerator[bytes]:
        await asyncio.sleep(0.3)
        raise QueueFullError("full")
        yield b""

    wire = Wire()
    await wire.play(EventStream(answering()), 0.1)
    assert [message["type"] for message in wire.sent].count("http.response.start") == 1
    assert wire.body.startswith(b": keep-alive\n\n")
    assert wire.body.endswith(b"first")
    wire = Wire()
    await wire.play(EventStream(failing(), on_error=last_error), 0.1)
    assert [message["type"] for message in wire.sent].count("http.response.start") == 1
    assert b'"code":"rate_limit_exceeded"' in wire.body
    assert wire.body.endswith(DONE)
    assert wire.sent[-1]["more_body"] is False


async def test_no_comment_is_sent_if_the_operator_turns_them_off() -> None:
    async def source() -> AsyncGenerator[bytes]:
        await asyncio.sleep(0.2)
        yield b"first"

    wire = Wire()
    await wire.play(EventStream(source()), 0)
    assert wire.body == b"first"


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, b"data: [DONE]\n\n"),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 9}, b"data: [DONE]\n\n"),
        (
            "/v1/messages",
            {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
            b'"type":"message_stop"}\n\n',
        ),
        ("/v1/responses", {"input": "Hi"}, b"}\n\n"),
    ],
)
async def test_every_streaming_endpoint_sends_comments_during_silence(
    path: str, body: dict[str, Any], end: bytes
) -> None:
    """Before the first token, and between tokens that cause no event."""
    slow = scripted(delay=0.06)
    async with served(slow, sse_keep_alive_interval=0.05, listens=True) as server:
        answer = await call(server.port, "POST", path, {"model": "demo", "stream": True, **body})
        assert answer.status == 200
        kept = {name: answer.headers[name] for name in ("content-type", "cache-control", "x-accel-buffering")}
        assert list(kept.values()) == ["text/event-stream; charset=utf-8", "no-cache", "no"]
        assert answer.body.count(b": keep-alive\n\n") >= 2
        assert answer.body.endswith(end)


async def test_a_disconnect_ends_work_that_is_not_streamed() -> None:
    wire = Wire()
    request = Request({"type": "http", "headers": []}, wire.receive)
    wire.leave.set()
    with pytest.raises(ClientDisconnect):
        await asyncio.wait_for(until_disconnect(request, asyncio.Event().wait()), 30)
