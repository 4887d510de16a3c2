"""A client that leaves frees its place at once, streamed or not, on every API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from chorale.api.app import create_app
from tests.support import PATIENCE
from tests.support.faces import WAYS, ask, request_body
from tests.support.scripted import FINAL, playing
from tests.support.server import make_state, with_server

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_leaving_aborts_the_request(face: str, stream: bool) -> None:
    client = playing(FINAL + "some text", hang=True)
    body = json.dumps(request_body(face, stream)).encode()
    leave = asyncio.Event()
    messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    async def main() -> None:
        async with make_state(client) as state:
            answering = asyncio.create_task(create_app(state)(scope(face, body), receive, send))
            while client.num_in_flight < 1:
                assert not answering.done()
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            assert client.aborted == []
            leave.set()
            await asyncio.wait_for(answering, PATIENCE)
            assert (client.num_in_flight, len(client.aborted)) == (0, 1)

    asyncio.run(main())


def scope(face: str, body: bytes) -> dict[str, Any]:
    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    return {
        "type": "http",
        "method": "POST",
        "path": PATHS[face],
        "raw_path": PATHS[face].encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "http_version": "1.1",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }


@pytest.mark.parametrize("face", ["chat", "responses", "messages"])
def test_the_next_request_finds_room(face: str) -> None:
    """A server of one place answers again after a client left."""
    client = playing(FINAL + "ok<|return|>")
    client.max_in_flight = 1

    async def main(server: Any) -> None:
        for _ in range(3):
            assert (await ask(server, face)).text == "ok"

    with_server(client, main)
