"""A request is aborted at once when its client disconnects, streamed or not, on every API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.event_loop import until
from tests.support.raw_http import connect
from tests.support.scripted import FINAL, playing
from tests.support.server import served

TURN: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**TURN, "n": 2},
    "/v1/completions": {"prompt": "hi", "n": 2},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**TURN, "model": "demo", "max_tokens": 50},
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_aborts_the_request(path: str, stream: bool) -> None:
    client = playing(FINAL + "some text", hang=True)
    body = json.dumps({**ASKED[path], "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

    async with served(client, listens=True) as server:
        _, writer = await connect(server.port)
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: client.num_in_flight == ASKED[path].get("n", 1))
        await asyncio.sleep(0.05)
        assert client.aborted == []
        writer.close()
        await until(lambda: server.state.lifecycle.num_requests == 0)
        assert client.aborted == [request.request_id for request in client.requests]
        assert client.num_in_flight == 0
        assert (await server.state.store.stats()).num_responses == 0
