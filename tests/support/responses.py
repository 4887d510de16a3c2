"""Responses over scripted tokens, and a reader of its events that asserts every rule that clients rely on."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from chorale.api.responses.background.recovery import recovery
from chorale.client.base import EngineClient, EngineInfo
from chorale.config.engine import ServerConfig
from chorale.store.store import ResponseStore, SqliteStore
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.server import VOCAB, Server, served

MODEL = "gpt-oss-test"
STRICT_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

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


def serve(
    *texts: str | Script,
    engine: EngineClient | None = None,
    store: ResponseStore | None = None,
    config: ServerConfig | None = None,
    key_hashes: tuple[bytes, ...] = (),
    max_model_len: int = 131072,
    max_in_flight: int = 1024,
    api_key: str = "unused",
    **options: Any,
) -> AbstractAsyncContextManager[Server]:
    """``texts`` and ``options``: those of ``ScriptedClient.play``."""
    info = EngineInfo(model="scripted", max_model_len=max_model_len, max_num_seqs=256)
    client = ScriptedClient(info_value=info, max_in_flight=max_in_flight)
    client.play(*texts, **options)
    return served(
        client if engine is None else engine,
        settings=config or ServerConfig(system_start_date="2026-01-02"),
        store=store if store is not None else SqliteStore(recover=recovery(VOCAB)),
        names=(MODEL, "alias"),
        keys=key_hashes,
        api_key=api_key,
        strict=True,
    )


WITHOUT_DELTAS = ("local_shell_call", "shell_call", "apply_patch_call", "tool_search_call")
TERMINAL = ("response.completed", "response.incomplete", "response.failed")


def fold_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Rebuild the body from the events as clients do; asserts the rules of the protocol."""
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
            if final["type"] in BUILT_IN:
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
        if not kind.startswith("response.shell_call_command."):  # these events have no item_id
            assert event["item_id"] == item["id"]
        _apply(kind, event, item)
    assert done == set(range(len(output)))
    body = events[-1]["response"]
    assert body["id"] == response_id
    assert body["output"] == output
    return dict(body)


BUILT_IN = {
    "web_search_call",
    "code_interpreter_call",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
}


def _known_early(item: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a tool's item that its events sent before its end. The tool may add a URL."""
    late = {"status", "outputs", "output", "error", "tools", "results"}
    known = {key: value for key, value in item.items() if key not in late}
    if "action" in known:
        early = {key for key, value in added["action"].items() if value}
        known["action"] = {key: value for key, value in known["action"].items() if key in early}
    return known


def _at_first(final: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    """Returns the finished item without the fields that no delta sends."""
    late = ("status", "encrypted_content")
    return {key: value for key, value in final.items() if key not in late} | {
        key: item[key] for key in late if key in item
    }


# Event -> the field of the item, or of its first part, to which its deltas add up.
DELTAS = {
    "output_text": "text",
    "reasoning_text": "text",
    "function_call_arguments": "arguments",
    "mcp_call_arguments": "arguments",
    "code_interpreter_call_code": "code",
    "custom_tool_call_input": "input",
}


def _apply(kind: str, event: dict[str, Any], item: dict[str, Any]) -> None:
    name, _, stage = kind.removeprefix("response.").rpartition(".")
    if name in DELTAS:
        place, field = item["content"][0] if name.endswith("_text") else item, DELTAS[name]
        if stage == "delta":
            place[field] += event["delta"]
            if name == "output_text":
                place["logprobs"] += event["logprobs"]
            return
        assert stage == "done"
        sent = {"output_text": ("logprobs",), "function_call_arguments": ("name",)}.get(name, ())
        for each in (field, *sent):
            assert event[each] == place[each]
    elif kind == "response.content_part.added":
        assert event["content_index"] == len(item["content"])
        item["content"].append(event["part"])
    elif kind == "response.content_part.done":
        assert event["part"] == item["content"][event["content_index"]]
    elif kind == "response.output_text.annotation.added":
        annotations = item["content"][0]["annotations"]
        assert event["annotation_index"] == len(annotations)
        annotations.append(event["annotation"])
    elif name == "shell_call_command":
        _apply_command(kind, event, item["action"]["commands"])
    elif kind == "response.compaction.compacting":
        assert item["type"] == "compaction"
    else:
        assert name in BUILT_IN, f"an event of type {kind}"
        assert name == item["type"]


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
    """Returns a body without the values that differ between two runs."""
    volatile = {"id", "call_id", "created_at", "completed_at"}
    if isinstance(value, dict):
        return {key: without_ids(entry) for key, entry in value.items() if key not in volatile}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value
