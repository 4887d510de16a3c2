"""A traced call reaches the MCP server with its place in the trace, and with nothing else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from chorale.tools.mcp.client import CallOutcome, McpClient, McpLimits
from chorale.tools.mcp.transport import StreamableHttp
from chorale.tools.mcp.wire import VERSIONS, Message, encode, success
from chorale.tracing.context import CURRENT, RequestContext, within
from tests.support.tracing.spans import KeptTracer


async def streamed(message: Message) -> AsyncIterator[bytes]:
    yield encode(message)


@pytest.mark.parametrize("traced", [False, True])
async def test_a_call_carries_its_traceparent(traced: bool) -> None:
    seen: list[tuple[str, Any, str | None]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        message = json.loads(request.content)
        meta = message.get("params", {}).get("_meta", {})
        seen.append((message["method"], meta.get("traceparent"), request.headers.get("traceparent")))
        assert "tracestate" not in request.headers
        if "id" not in message:
            return httpx2.Response(202)
        result = {"protocolVersion": VERSIONS[0], "content": [{"type": "text", "text": "42"}]}
        return httpx2.Response(200, content=streamed(success(message["id"], result)))

    async def call() -> CallOutcome:
        http = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
        client = McpClient([lambda: StreamableHttp(http, "http://mcp.example/mcp")], McpLimits())
        try:
            with within("execute_tool ask", {}):
                async for item in client.run("ask", {}, "token"):
                    assert isinstance(item, CallOutcome)
                    return item
        finally:
            await client.aclose()
        raise AssertionError("no outcome")

    if traced:
        CURRENT.set(RequestContext("req_1", KeptTracer().start("x", {}, {}, "server")))
    assert (await call()).text == "42"

    wanted = f"00-{1:032x}-{3:016x}-01" if traced else None  # the span of the call, below the request's
    assert seen[-1] == ("tools/call", wanted, wanted)
    assert [method for method, *_ in seen] == ["initialize", "notifications/initialized", "tools/call"]
