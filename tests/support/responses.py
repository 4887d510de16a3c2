"""A server over scripted tokens, the unmodified OpenAI SDK in front of it, and a strict reader of SSE."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.routing import Router

from chorale.api import conversations
from chorale.api.http.auth import authenticate_routes
from chorale.api.http.middleware import HttpMiddleware, unknown_path
from chorale.api.operator import models
from chorale.api.operator.metrics import Metrics
from chorale.api.responses import routes
from chorale.api.state import ServerState
from chorale.client.base import EngineClient, EngineInfo
from chorale.config import ServerConfig
from chorale.engine.types import GenerateRequest
from chorale.harmony.vocab import load_vocabulary
from chorale.store.protocol import ResponseStore
from chorale.store.store import SqliteStore
from chorale.testing.scripted_client import Script, ScriptedClient

VOCAB = load_vocabulary()
MODEL = "gpt-oss-test"
STRICT_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
STRICT_RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)

HELLO = (
    "<|channel|>analysis<|message|>Say hi.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Hi there!<|return|>"
)
CALL = (
    "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris"}<|call|>'
)
ANSWER = "<|channel|>final<|message|>21 °C in Paris.<|return|>"
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}


def tokens(text: str) -> list[int]:
    return VOCAB.encode_with_special(text)


@dataclass
class Server:
    app: HttpMiddleware
    client: ScriptedClient
    store: ResponseStore
    sdk: AsyncOpenAI
    http: httpx2.AsyncClient

    async def post(self, **body: Any) -> Any:
        response = await self.http.post("/v1/responses", json={"model": MODEL, **body})
        if response.status_code == 200:
            STRICT_RESPONSE.validate_json(response.content, strict=True)
        return response.status_code, response.json()

    async def events(self, **body: Any) -> list[dict[str, Any]]:
        response = await self.http.post("/v1/responses", json={"model": MODEL, "stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_sse(response.content)

    def prompt(self, index: int = -1) -> list[int]:
        return self.client.requests[index].prompt_token_ids

    def prompt_text(self, index: int = -1) -> str:
        return VOCAB.decode(self.prompt(index))


def scripts(*texts: str | Script, **options: Any) -> Callable[[GenerateRequest, int], Script]:
    """The n-th request plays the n-th text; the last one repeats."""
    count = -1

    def source(request: GenerateRequest, index: int) -> Script:
        nonlocal count
        count = min(count + 1, len(texts) - 1)
        text = texts[count]
        if isinstance(text, Script):
            return text
        with_logprobs = request.sampling.logprobs is not None
        return Script(tokens(text), with_logprobs=with_logprobs, **options)

    return source


@asynccontextmanager
async def serve(
    *texts: str | Script,
    engine: EngineClient | None = None,
    store: ResponseStore | None = None,
    config: ServerConfig | None = None,
    key_hashes: tuple[bytes, ...] = (),
    max_model_len: int = 131072,
    max_in_flight: int = 1024,
    api_key: str = "unused",
    **options: Any,
) -> AsyncIterator[Server]:
    info = EngineInfo(model="scripted", max_model_len=max_model_len, max_num_seqs=256)
    client = ScriptedClient(scripts(*texts, **options), info_value=info, max_in_flight=max_in_flight)
    kept: ResponseStore = store if store is not None else SqliteStore()
    state = ServerState(
        client=engine if engine is not None else client,
        config=config or ServerConfig(system_start_date="2026-01-02"),
        vocab=VOCAB,
        metrics=Metrics(MODEL),
        store=kept,
        model_names=(MODEL, "alias"),
    )
    found = authenticate_routes(
        [*routes(state), *conversations.routes(state), *models.routes(state)], key_hashes
    )
    app = HttpMiddleware(Router(found, redirect_slashes=False, default=unknown_path), state, bool(key_hashes))
    http = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app),
        base_url="http://test",
        headers={"authorization": f"Bearer {api_key}"},
    )
    sdk = AsyncOpenAI(base_url="http://test/v1", api_key=api_key, http_client=http, max_retries=0)
    try:
        yield Server(app, client, kept, sdk, http)
    finally:
        await http.aclose()
        await state.background.close(kept)
        await client.close()
        await kept.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test body; a test that hangs fails in seconds."""

    async def limited() -> None:
        await asyncio.wait_for(scenario(), 20)

    asyncio.run(limited())


def parse_sse(content: bytes, first: int = 0) -> list[dict[str, Any]]:
    """Every event has an ``event:`` line equal to its type, and a number one above the last."""
    if first and not content:
        return []
    assert content.endswith(b"\n\n")
    content = content.removesuffix(b"data: [DONE]\n\n")  # of the open-responses dialect
    assert b"[DONE]" not in content
    events = []
    for frame in content[:-2].split(b"\n\n"):
        name, data = frame.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        assert event["sequence_number"] == first + len(events)
        events.append(event)
    return events


WITHOUT_DELTAS = ("local_shell_call", "shell_call", "apply_patch_call", "tool_search_call")
TERMINAL = ("response.completed", "response.incomplete", "response.failed")


def fold_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Rebuild the body from the events by the rules that clients use; every rule is asserted."""
    for event in events:
        STRICT_EVENT.validate_json(json.dumps(event), strict=True)
    kinds = [event["type"] for event in events]
    start = kinds.index("response.in_progress") + 1
    assert kinds[:start] == ["response.created", *["response.queued"][: start - 2], "response.in_progress"]
    assert events[-1]["type"] in TERMINAL
    assert sum(event["type"] in TERMINAL for event in events) == 1
    response_id = events[0]["response"]["id"]
    output: list[dict[str, Any]] = []
    done: set[int] = set()
    for event in events[start:-1]:
        kind = event["type"]
        assert not event.get("error")
        if kind == "error":
            continue
        index = event["output_index"]
        if kind == "response.output_item.added":
            assert index == len(output)
            assert event["item"].get("status", "in_progress") == "in_progress"
            output.append(event["item"])
            continue
        item = output[index]
        assert index not in done
        if kind == "response.output_item.done":
            final = event["item"]
            assert (final["id"], final["type"]) == (item["id"], item["type"])
            if final["type"] in HOSTED:
                assert _known_early(item, item) == _known_early(final, item), (
                    "deltas do not add up to the item"
                )
            elif final["type"] == "shell_call" and final["status"] == "completed":
                assert final["action"]["commands"] == item["action"]["commands"]
            elif final["type"] not in WITHOUT_DELTAS:
                assert _at_first(final, item) == item, "deltas do not add up to the item"
            output[index] = final
            done.add(index)
            continue
        if not kind.startswith("response.shell_call_command."):  # which has no item_id
            assert event["item_id"] == item["id"]
        _apply(kind, event, item)
    assert done == set(range(len(output)))
    body = events[-1]["response"]
    assert body["id"] == response_id
    assert body["output"] == output
    return dict(body)


HOSTED = {
    "web_search_call",
    "code_interpreter_call",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
}


def _known_early(item: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """Of a tool's item, what its events told before it was done. An address may be found by the tool."""
    late = {"status", "outputs", "output", "error", "tools", "results"}
    known = {key: value for key, value in item.items() if key not in late}
    if "action" in known:
        early = {key for key, value in added["action"].items() if value}
        known["action"] = {key: value for key, value in known["action"].items() if key in early}
    return known


def _at_first(final: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    """The finished item, but for what no delta brings."""
    late = ("status", "encrypted_content")
    return {key: value for key, value in final.items() if key not in late} | {
        key: item[key] for key in late if key in item
    }


def _apply(kind: str, event: dict[str, Any], item: dict[str, Any]) -> None:
    if kind == "response.content_part.added":
        assert event["content_index"] == len(item["content"])
        item["content"].append(event["part"])
    elif kind == "response.content_part.done":
        assert event["part"] == item["content"][event["content_index"]]
    elif kind == "response.output_text.delta":
        item["content"][0]["text"] += event["delta"]
        item["content"][0]["logprobs"] += event["logprobs"]
    elif kind == "response.output_text.done":
        assert event["text"] == item["content"][0]["text"]
        assert event["logprobs"] == item["content"][0]["logprobs"]
    elif kind == "response.reasoning_text.delta":
        item["content"][0]["text"] += event["delta"]
    elif kind == "response.reasoning_text.done":
        assert event["text"] == item["content"][0]["text"]
    elif kind == "response.function_call_arguments.delta":
        item["arguments"] += event["delta"]
    elif kind == "response.output_text.annotation.added":
        annotations = item["content"][0]["annotations"]
        assert event["annotation_index"] == len(annotations)
        annotations.append(event["annotation"])
    elif kind == "response.code_interpreter_call_code.delta":
        item["code"] += event["delta"]
    elif kind == "response.code_interpreter_call_code.done":
        assert event["code"] == item["code"]
    elif kind == "response.mcp_call_arguments.delta":
        item["arguments"] += event["delta"]
    elif kind == "response.mcp_call_arguments.done":
        assert event["arguments"] == item["arguments"]
    elif kind.split(".")[1] in HOSTED:
        assert kind.split(".")[1] == item["type"]
    elif kind == "response.function_call_arguments.done":
        assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
    elif kind == "response.custom_tool_call_input.delta":
        item["input"] += event["delta"]
    elif kind == "response.custom_tool_call_input.done":
        assert event["input"] == item["input"]
    elif kind.startswith("response.shell_call_command."):
        _apply_command(kind, event, item["action"]["commands"])
    elif kind == "response.compaction.compacting":
        assert item["type"] == "compaction"
    else:
        raise AssertionError(f"an event of type {kind}")


def _apply_command(kind: str, event: dict[str, Any], commands: list[str]) -> None:
    number = event["command_index"]
    if kind.endswith("added"):
        assert (number, event["command"]) == (len(commands), "")
        commands.append("")
    elif kind.endswith("delta"):
        assert number == len(commands) - 1
        commands[number] += event["delta"]
    else:
        assert event["command"] == commands[number]


def without_ids(value: Any) -> Any:
    """A body with what differs between two runs taken out."""
    volatile = {"id", "call_id", "created_at", "completed_at"}
    if isinstance(value, dict):
        return {key: without_ids(entry) for key, entry in value.items() if key not in volatile}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value
