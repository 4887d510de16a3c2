"""Our tool servers' HTTP face against odd messages and odd headers, and who may come in."""

from __future__ import annotations

import httpx2
import pytest

from chorale.tools.mcp_server.app import create_app
from chorale.tools.mcp_server.server import ToolServer
from tests.support.tools.drive import service_of

PING = {"id": 1, "method": "ping"}


async def ask(
    message: object, key: str | None = None, method: str = "POST", **headers: str
) -> httpx2.Response:
    async with service_of(browser="offline") as service:
        server = ToolServer("browser", service)
        transport = httpx2.ASGITransport(app=create_app(server, host="127.0.0.1", key=key))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answer = await client.request(method, "/mcp", json=message, headers=headers)
        await server.aclose()
    return answer


async def test_messages_that_are_neither_request_nor_notification() -> None:
    assert (await ask({"id": None, "method": "ping"})).status_code == 202
    assert (await ask({"id": 1, "method": None})).status_code == 202
    assert (await ask({"id": 1, "method": 5})).json()["error"]["code"] == -32600
    assert (await ask("x" * 2**21)).status_code == 413


@pytest.mark.parametrize(
    "headers", [{"host": "["}, {"host": "evil.example"}, {"origin": "http://["}, {"origin": "null"},
                {"origin": "https://evil.example"}]
)  # fmt: skip
async def test_names_that_are_not_local_are_refused_even_with_the_key(headers: dict[str, str]) -> None:
    assert (await ask(PING, "s3cret", authorization="Bearer s3cret", **headers)).status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"authorization": "Bearer nope"}, 401), ({"authorization": "Bearer s3cret"}, 200)],
)
async def test_the_key_is_required(headers: dict[str, str], status: int) -> None:
    assert (await ask(PING, "s3cret", host="localhost:1", **headers)).status_code == status


async def test_get_is_not_allowed() -> None:
    assert (await ask(None, method="GET")).status_code == 405
