"""The whole app over scripted tokens and scripted tools; every answer passes a recorder."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2

from chorale.client.base import EngineInfo
from chorale.config.engine import hash_key
from tests.support import server as support
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.responses import scripts
from tests.support.scripted_tools import Progress, ScriptedService, ToolCall, ToolResult, plain, result
from tests.support.sse import frames
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


@dataclass
class RecordedServer:
    http: httpx2.AsyncClient
    client: ScriptedClient
    dialect: str = "openai"

    def play(self, *texts: str | Script, **options: Any) -> None:
        """Sets the model's output for the following requests; the last text repeats."""
        self.client.source = scripts(*texts, **options)

    async def post(self, path: str, status: int = 200, **body: Any) -> Any:
        """Returns the JSON of the answer, or a stream's events."""
        response = await self.http.post(path, json={"model": MODEL, **body}, headers={DIALECT: self.dialect})
        return _read(response, status)

    async def bare(self, path: str, **body: Any) -> Any:
        """Posts a body without ``model``, for endpoints that have none."""
        return _read(await self.http.post(path, json=body, headers={DIALECT: self.dialect}), 200)

    async def get(self, path: str, status: int = 200) -> Any:
        return _read(await self.http.get(path, headers={DIALECT: self.dialect}), status)

    async def delete(self, path: str) -> Any:
        return _read(await self.http.delete(path), 200)

    async def ended(self, response_id: str) -> Any:
        """Returns a background response once it has ended."""
        while True:
            body = await self.get(f"/v1/responses/{response_id}")
            if body["status"] not in ("queued", "in_progress"):
                return body
            await asyncio.sleep(0.01)


def _read(response: httpx2.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    if response.headers["content-type"].startswith("application/json"):
        return response.json()
    return frames(response)


@contextlib.asynccontextmanager
async def served(
    recorder: Recorder, dialect: str = "openai", keys: bool = False, **config: Any
) -> AsyncIterator[RecordedServer]:
    info = EngineInfo(model="scripted", max_model_len=131072, max_num_seqs=256)
    client = ScriptedClient(scripts("<|channel|>final<|message|>Hi.<|return|>"), info_value=info)
    tools = ScriptedService(run_tool, broken={"dead": "no answer"})
    state = {"names": (MODEL, "alias"), "tool_service": tools, "system_start_date": "2026-01-02", **config}
    hashes = [hash_key(KEY)] if keys else []
    try:
        async with support.served(client, keys=hashes, on_response=recorder, **state) as server:
            yield RecordedServer(server.http, client, dialect)
    finally:
        await client.close()
