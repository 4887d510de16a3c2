"""One request in the words of five faces: Responses (at once, in the background, streamed), Chat (both)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chorale.config import ToolConfig
from tests.support import PATIENCE
from tests.support.responses import fold_events
from tests.support.scripted import events_of, fold_chat
from tests.support.server import Server, real_tools, served
from tests.support.sse import parse_sse

FACES = ("responses", "responses_background", "responses_stream", "chat", "chat_stream")


@dataclass
class Outcome:
    finish: str  # stop, length, tool_calls
    text: str = ""
    functions: list[tuple[str, str]] = field(default_factory=list)  # (name, arguments)
    builtin: list[tuple[str, str]] = field(default_factory=list)  # (type of item, status)
    cited: list[tuple[str, str]] = field(default_factory=list)  # (what stands in the text, url)
    outputs: list[str] = field(default_factory=list)  # of python


async def ask(server: Server, face: str, content: str = "hi", **fields: Any) -> Outcome:
    """``fields`` in the words of Responses; those of Chat are made of them."""
    if face.startswith("chat"):
        return await _chat(server, content, face == "chat_stream", _for_chat(fields))
    limits = {"max_output_tokens": fields.pop("max_tokens")} if "max_tokens" in fields else {}
    body = {
        "input": content,
        "include": ["code_interpreter_call.outputs"],
        "background": face == "responses_background",
        "stream": face == "responses_stream",
        **limits,
        **fields,
    }
    response = await server.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    if face == "responses_stream":
        return _of_response(fold_events(parse_sse(response.content)))
    answer = response.json()
    if face == "responses_background":
        assert answer["status"] == "queued"
    while answer["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.02)
        answer = (await server.http.get(f"/v1/responses/{answer['id']}")).json()
    return _of_response(answer)


async def _chat(server: Server, content: str, stream: bool, fields: dict[str, Any]) -> Outcome:
    body = {"messages": [{"role": "user", "content": content}], "stream": stream, **fields}
    response = await server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        choice = response.json()["choices"][0]
        return _of_message(choice["message"], choice["finish_reason"])
    chunks = events_of(response)
    folded = fold_chat(chunks)[0]
    message = {
        "content": folded["content"],
        "tool_calls": [{"function": call} for call in folded["calls"].values()],
        "annotations": _pieces(chunks, "annotations"),
        "builtin_tool_calls": _joined(_pieces(chunks, "builtin_tool_calls")),
    }
    return _of_message(message, folded["finish_reason"])


def _for_chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    made = {key: value for key, value in fields.items() if key not in ("text", "tools", "tool_choice")}
    if "tools" in fields:
        made["tools"] = [_nested(tool) for tool in fields["tools"]]
    choice = fields.get("tool_choice")
    if isinstance(choice, Mapping):
        inner = {"mode": choice.get("mode"), "tools": [_nested(tool) for tool in choice.get("tools", ())]}
        allowed = choice["type"] == "allowed_tools"
        choice = {"type": "allowed_tools", "allowed_tools": inner} if allowed else _nested(choice)
    if choice is not None:
        made["tool_choice"] = choice
    if "text" in fields:
        form = dict(fields["text"]["format"])
        kind = form.pop("type")
        made["response_format"] = {"type": kind, kind: form}
    return made


def _nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        return dict(tool)
    return {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}


def _pieces(chunks: list[Any], key: str) -> list[Any]:
    return [piece for chunk in chunks for c in chunk["choices"] for piece in c["delta"].get(key, ())]


def _joined(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        entry = found.setdefault(piece["index"], {})
        for key, value in piece.items():
            joins = key in ("arguments", "output")
            entry[key] = entry.get(key, "") + value if joins else value
    return list(found.values())


def _of_message(message: dict[str, Any], finish: str) -> Outcome:
    text = message["content"] or ""
    cited = [entry["url_citation"] for entry in message.get("annotations") or ()]
    calls = message.get("builtin_tool_calls") or []
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return Outcome(
        finish,
        text,
        [(function["name"], function["arguments"]) for function in functions],
        [(call["type"], call["status"]) for call in calls],
        [(text[entry["start_index"] : entry["end_index"]], entry["url"]) for entry in cited],
        [call["output"] for call in calls if call["type"] == "code_interpreter_call"],
    )


def _of_response(body: dict[str, Any]) -> Outcome:
    assert body["status"] in ("completed", "incomplete"), body
    found = Outcome("length" if body["status"] == "incomplete" else "stop")
    for item in body["output"]:
        if item["type"] == "function_call":
            found.functions.append((item["name"], item["arguments"]))
        elif item["type"] == "message":
            part = item["content"][0]
            found.text += part["text"]
            for entry in part["annotations"]:
                found.cited.append((part["text"][entry["start_index"] : entry["end_index"]], entry["url"]))
        elif item["type"].endswith("_call"):
            found.builtin.append((item["type"], item["status"]))
            if item["type"] == "code_interpreter_call":
                found.outputs.append("".join(output["logs"] for output in item["outputs"]))
    if found.functions and found.finish == "stop":
        found.finish = "tool_calls"
    return found


def run(client: Any, tools: ToolConfig, main: Callable[[Server], Awaitable[Any]]) -> None:
    """``main`` against the app with real tools."""

    async def body() -> None:
        async with real_tools(tools) as service:
            options = {"names": ("demo",), "tools": tools, "tool_service": service}
            async with served(client, system_start_date="2026-01-02", **options) as server:
                await asyncio.wait_for(main(server), PATIENCE)

    asyncio.run(body())
