"""The app over the real engine with a small random checkpoint of the full vocabulary."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2

from chorale.config.engine import EngineConfig
from chorale.model.config_writer import make_config
from chorale.serve.engine.build import build_engine
from chorale.testing.checkpoint_writer import write_random_checkpoint
from tests.support import PATIENCE
from tests.support.local_client import LocalClient
from tests.support.server import VOCAB as VOCAB
from tests.support.server import Server, with_server
from tests.support.sse import frames

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


async def choose(server: Server, content: str = "hi", **fields: Any) -> Any:
    """The first choice of a chat, streamed or not, in one form."""
    response = await server.chat(content, **fields)
    assert response.status_code == 200, response.text
    return _folded(response) if fields.get("stream") else response.json()["choices"][0]


async def response_to(server: Server, content: str = "hi", **fields: Any) -> Any:
    """A response object, streamed or not."""
    response = await server.http.post("/v1/responses", json={"input": content, "store": False, **fields})
    assert response.status_code == 200, response.text
    return frames(response)[-1]["response"] if fields.get("stream") else response.json()


def _folded(response: httpx2.Response) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    finish = None
    for chunk in frames(response):
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


def run(client: Any, main: Callable[[Server], Awaitable[Any]], seconds: float = PATIENCE) -> Any:
    return with_server(client, main, seconds=seconds, names=("demo",), system_start_date="2026-01-02")


def text_of(response: dict[str, Any]) -> str:
    """The text of a response's one message."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    assert len(messages) == 1, response["output"]
    text: str = messages[0]["content"][0]["text"]
    return text
