"""Our tool servers' HTTP face against odd messages, odd headers and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest

from chorale.config import ToolConfig
from chorale.tools.mcp.app import create_app
from chorale.tools.mcp.server import ToolServer
from chorale.tools.mcp.wire import Message
from chorale.tools.service import start_tools
from tests.support.tools.drive import count_words, run


async def posted(message: object, **headers: str) -> httpx2.Response:
    service = await start_tools(ToolConfig(browser="offline"), {}, count_words)
    server = ToolServer("browser", service)
    transport = httpx2.ASGITransport(app=create_app(server, host="127.0.0.1", key=None))
    try:
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/mcp", json=message, headers=headers)
    finally:
        await server.aclose()
        await service.aclose()


def test_messages_that_are_neither_request_nor_notification() -> None:
    assert run(posted({"id": None, "method": "ping"})).status_code == 202
    assert run(posted({"id": 1, "method": None})).status_code == 202
    refused = run(posted({"id": 1, "method": 5})).json()
    assert refused["error"]["code"] == -32600


@pytest.mark.parametrize("headers", [{"host": "["}, {"origin": "http://["}, {"origin": "null"}])
def test_names_that_are_no_names_are_refused(headers: dict[str, str]) -> None:
    assert run(posted({"id": 1, "method": "ping"}, **headers)).status_code == 403


class Endless:
    """Stands for a ``ToolServer`` whose call never ends by itself."""

    def __init__(self) -> None:
        self.started, self.ended = asyncio.Event(), asyncio.Event()

    async def answer(self, message: Message, session: str) -> AsyncGenerator[Message, None]:
        try:
            while True:
                yield message
                self.started.set()
        finally:
            self.ended.set()

    async def end(self, key: str) -> None:
        """No session is kept."""


def test_a_call_ends_when_its_stream_does() -> None:
    """It filled the queue of a connection that is gone, and held its session's lock for good."""

    async def work() -> None:
        server: Any = Endless()
        app = create_app(server, host="0.0.0.0", key=None)
        gone, endpoint = asyncio.Event(), asyncio.Queue[str]()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if b"endpoint" in message.get("body", b""):
                endpoint.put_nowait(message["body"].decode().split("data: ")[1].strip())

        scope = {"type": "http", "method": "GET", "path": "/sse", "query_string": b"", "headers": []}
        stream = asyncio.create_task(app(scope, receive, send))
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://h") as client:
            await client.post(await endpoint.get(), json={"id": 1, "method": "tools/call"})
        await server.started.wait()
        gone.set()
        await stream
        async with asyncio.timeout(2):
            await server.ended.wait()

    run(work())
