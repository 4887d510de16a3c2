"""The whole HTTP face over the real engine on a small random checkpoint of the full vocabulary."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from chorale.api.app import create_app
from chorale.api.operator.metrics import Metrics
from chorale.api.state import ServerState
from chorale.client.local import LocalClient
from chorale.config import EngineConfig, ServerConfig
from chorale.harmony.vocab import load_vocabulary
from chorale.model.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from chorale.serve.build import build_engine
from chorale.store.store import open_store

VOCAB = load_vocabulary()
SIZES: dict[str, Any] = {
    "layers": 2,
    "experts": 4,
    "hidden": 32,
    "inter": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "sliding_window": 32,
}


def write_checkpoint(folder: Path, seed: int = 1) -> Path:
    return write_random_checkpoint(folder, make_config(**SIZES), seed=seed)


def make_client(folder: Path, **options: Any) -> LocalClient:
    settings = {"device": "cpu", "max_model_len": 4096, "max_num_seqs": 16, "num_threads": 1, **options}
    core, info = build_engine(EngineConfig(model=str(folder), **settings))
    return LocalClient(core, info, max_queued_requests=4096)


@dataclass
class Server:
    http: httpx2.AsyncClient
    state: ServerState

    async def post(self, path: str, **body: Any) -> Any:
        response = await self.http.post(path, json=body)
        return response.status_code, response.json()

    async def chat(self, content: str = "hi", **fields: Any) -> Any:
        """The first choice of a chat, streamed or not, in one form."""
        body = {"messages": [{"role": "user", "content": content}], **fields}
        response = await self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return _folded(response.text) if fields.get("stream") else response.json()["choices"][0]

    async def respond(self, content: str = "hi", **fields: Any) -> Any:
        """A response object, streamed or not."""
        response = await self.http.post("/v1/responses", json={"input": content, "store": False, **fields})
        assert response.status_code == 200, response.text
        if not fields.get("stream"):
            return response.json()
        last = response.text.strip().split("\n\n")[-1].split("\n")[1]
        return json.loads(last.removeprefix("data: "))["response"]


def _folded(text: str) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    finish = None
    for frame in text.strip().split("\n\n")[:-1]:
        if frame.startswith(":"):  # a slow machine is silent long enough for a comment
            continue
        chunk = json.loads(frame.removeprefix("data: "))
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(
                        {"function": {"name": piece["function"]["name"], "arguments": ""}}
                    )
                message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"].get(
                    "arguments", ""
                )
    return {"message": message, "finish_reason": finish}


@contextlib.asynccontextmanager
async def served(client: Any, **config: Any) -> AsyncIterator[Server]:
    settings = ServerConfig(port=0, response_store=":memory:", system_start_date="2026-01-02", **config)
    store = open_store(settings)
    state = ServerState(client, settings, VOCAB, Metrics("demo"), store, ("demo",))
    transport = httpx2.ASGITransport(create_app(state))
    try:
        async with httpx2.AsyncClient(transport=transport, base_url="http://server", timeout=None) as http:
            yield Server(http, state)
    finally:
        await store.close()


def run(client: Any, main: Callable[[Server], Awaitable[Any]], timeout: float = 120, **config: Any) -> Any:
    async def body() -> Any:
        async with served(client, **config) as server:
            return await asyncio.wait_for(main(server), timeout)

    return asyncio.run(body())


def text_of(response: dict[str, Any]) -> str:
    """The text of a response's one message."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    assert len(messages) == 1, response["output"]
    text: str = messages[0]["content"][0]["text"]
    return text
