"""Clients that leave: the engine's request is aborted at once, streaming or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.scripted import FINAL, playing
from tests.support.server import run, served


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(path: str, stream: bool) -> None:
    client = playing(FINAL + "some text", hang=True)
    content: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    )
    body = json.dumps({**content, "n": 2, "stream": stream}).encode()
    sent: list[Any] = []
    leave = asyncio.Event()

    async def main() -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [
                (b"host", b"server"),
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
            ],
            "http_version": "1.1",
            "scheme": "http",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        async with served(client) as server:
            answering = asyncio.create_task(server.app(scope, receive, send))
            while not client.requests or client.num_in_flight < 2:
                assert not answering.done(), sent
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            assert client.aborted == []
            leave.set()
            await asyncio.wait_for(answering, 30)
        assert client.num_in_flight == 0
        assert len(client.aborted) == 1

    run(main)
    if stream:
        assert any(b"some" in message.get("body", b"") for message in sent)
    else:
        assert not any(message["type"] == "http.response.start" for message in sent)
