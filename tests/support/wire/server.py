"""The whole app over scripted tokens and scripted tools; every answer passes a recorder."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from chorale.config.engine import hash_key
from tests.support import server as support
from tests.support.scripted_tools import Progress, ScriptedService, ToolCall, ToolResult, plain, result
from tests.support.server import Server
from tests.support.wire.recorder import DIALECT, Recorder

MODEL = "demo"
KEY = "a key"


async def run_tool(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
    """Runs a scripted tool, which fails on request."""
    if "fail" in call.content:
        yield result(call, "it failed", failed=True)
        return
    async for entry in plain(call):
        yield entry


async def post(server: Server, path: str, status: int = 200, **body: Any) -> Any:
    return await server.ask("POST", path, status, model=MODEL, **body)


@contextlib.asynccontextmanager
async def served(
    recorder: Recorder, dialect: str = "openai", keys: bool = False, **config: Any
) -> AsyncIterator[Server]:
    tools = ScriptedService(run_tool, broken={"dead": "no answer"})
    state = {"names": (MODEL, "alias"), "tool_service": tools, "system_start_date": "2026-01-02", **config}
    hashes = [hash_key(KEY)] if keys else []
    async with support.served(keys=hashes, on_response=recorder, **state) as server:
        server.http.headers[DIALECT] = dialect
        yield server
