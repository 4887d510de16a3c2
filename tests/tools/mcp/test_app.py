"""Our tool servers' HTTP face against odd messages and odd headers."""

from __future__ import annotations

import httpx2
import pytest

from chorale.config.engine import ToolConfig
from chorale.tools.mcp_server.app import create_app
from chorale.tools.mcp_server.server import ToolServer
from chorale.tools.service import start_tools
from tests.support.event_loop import run
from tests.support.tools.drive import count_words


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
