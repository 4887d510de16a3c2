"""One question, asked through every API, streamed or not: the whole app over scripted tokens or an engine.

``ask`` describes a turn in the same terms for each API (instructions, a history of user texts, thoughts,
calls and results, functions) and returns an ``Outcome``, so that one test covers every API (a "face").
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from chorale.api.state import ServerState
from tests.support.engine.scripted_client import ScriptedClient
from tests.support.scripted import fold_chat
from tests.support.server import Server
from tests.support.sse import frames

FACES = ("chat", "responses", "messages")
WAYS = [(face, stream) for face in FACES for stream in (False, True)]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@dataclass
class Outcome:
    """The result of a turn, independent of the API. ``finish``: stop, length or tool_calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # (name, arguments)
    call_ids: list[str] = field(default_factory=list)
    finish: str = ""
    num_input: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_reasoning: int = 0
    builtin: list[tuple[str, str]] = field(default_factory=list)  # (type of item, status)
    raw: Any = None

    def told(self) -> tuple[Any, ...]:
        """Returns the fields that must be equal in two runs of the same tokens, without ids."""
        return self.text, self.reasoning, self.calls, self.finish, self.num_output, self.num_reasoning


async def send(server: Server, face: str, body: dict[str, Any]) -> httpx2.Response:
    paths = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
    return await server.http.post(paths[face], json=body)


async def ask(server: Server, face: str, stream: bool = False, **asked: Any) -> Outcome:
    """Asks with the arguments of ``request_body``. Fails unless the status is 200."""
    response = await send(server, face, request_body(face, stream, **asked))
    assert response.status_code == 200, response.text
    while asked.get("background") and response.json()["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.02)
        response = await server.http.get(f"/v1/responses/{response.json()['id']}")
    return read(face, stream, response)


# --------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class Call:
    """An entry of a history: a call, its result, and the thought before it."""

    name: str = "get_weather"
    arguments: str = '{"city":"Paris"}'
    result: str = "21"
    thought: str = ""


def request_body(
    face: str,
    stream: bool = False,
    *,
    history: Sequence[Any] = ("hi",),
    instructions: str | None = None,
    functions: Sequence[dict[str, Any]] = (),
    choice: Any = None,
    max_tokens: int | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """``history``: user texts, ``("assistant", text, thought)`` answers and ``Call``s, in order."""
    make = {"chat": _chat, "responses": _responses, "messages": _messages}[face]
    body = make(history, instructions, functions, choice, max_tokens)
    return {**body, "model": "demo", "stream": stream, **extra}


def _chat(history: Any, instructions: Any, functions: Any, choice: Any, limit: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for number, entry in enumerate(history):
        if isinstance(entry, str):
            messages.append({"role": "user", "content": entry})
        elif isinstance(entry, Call):
            function = {"name": entry.name, "arguments": entry.arguments}
            made = {"id": f"c{number}", "type": "function", "function": function}
            said = {"content": None, "reasoning_content": entry.thought, "tool_calls": [made]}
            messages.append({"role": "assistant", **said})
            messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": entry.result})
        else:
            messages.append({"role": "assistant", "content": entry[1], "reasoning_content": entry[2]})
    body: dict[str, Any] = {"messages": messages}
    if functions:
        body["tools"] = [{"type": "function", "function": function} for function in functions]
    if choice is not None:
        named = not isinstance(choice, str)
        body["tool_choice"] = {"type": "function", "function": {"name": choice[0]}} if named else choice
    return body if limit is None else {**body, "max_completion_tokens": limit}


def _responses(history: Any, instructions: Any, functions: Any, choice: Any, limit: Any) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for number, entry in enumerate(history):
        if isinstance(entry, str):
            items.append({"role": "user", "content": entry})
            continue
        thought = entry.thought if isinstance(entry, Call) else entry[2]
        if thought:
            content = [{"type": "reasoning_text", "text": thought}]
            items.append({"type": "reasoning", "summary": [], "content": content})
        if isinstance(entry, Call):
            given = {"call_id": f"c{number}", "name": entry.name, "arguments": entry.arguments}
            items.append({"type": "function_call", **given})
            items.append({"type": "function_call_output", "call_id": f"c{number}", "output": entry.result})
        else:
            items.append({"role": "assistant", "content": entry[1]})
    body: dict[str, Any] = {"input": items, "instructions": instructions}
    if functions:
        body["tools"] = [{"type": "function", **function} for function in functions]
    if choice is not None:
        body["tool_choice"] = choice if isinstance(choice, str) else {"type": "function", "name": choice[0]}
    return body if limit is None else {**body, "max_output_tokens": limit}


def _messages(history: Any, instructions: Any, functions: Any, choice: Any, limit: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for number, entry in enumerate(history):
        if isinstance(entry, str):
            messages.append({"role": "user", "content": entry})
            continue
        thought = entry.thought if isinstance(entry, Call) else entry[2]
        blocks = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
        if isinstance(entry, Call):
            given = json.loads(entry.arguments)
            blocks.append({"type": "tool_use", "id": f"c{number}", "name": entry.name, "input": given})
            result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": entry.result}
            messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        else:
            blocks.append({"type": "text", "text": entry[1]})
            messages.append({"role": "assistant", "content": blocks})
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": limit or 10_000,
        "thinking": {"type": "adaptive"},
    }
    if instructions:
        body["system"] = instructions
    if functions:
        body["tools"] = [{**f, "input_schema": f["parameters"], "parameters": None} for f in functions]
        for tool in body["tools"]:
            del tool["parameters"]
    if choice is not None:
        kinds = {"auto": "auto", "none": "none", "required": "any"}
        named = not isinstance(choice, str)
        body["tool_choice"] = {"type": "tool", "name": choice[0]} if named else {"type": kinds[choice]}
    return body


# --------------------------------------------------------------------------- answers


def read(face: str, stream: bool, response: httpx2.Response) -> Outcome:
    reader = {"chat": _read_chat, "responses": _read_responses, "messages": _read_messages}[face]
    return reader(frames(response) if stream else response.json(), stream)


def _read_chat(raw: Any, stream: bool) -> Outcome:
    if stream:
        [(_, choice)] = fold_chat(raw).items()
        message = {"builtin_tool_calls": joined(pieces(raw, "builtin_tool_calls"))}
        calls = [choice["calls"][index] for index in sorted(choice["calls"])]
        usage = next((chunk["usage"] for chunk in reversed(raw) if chunk.get("usage")), None)
        text, reasoning, finish = choice["content"], choice["reasoning"], choice["finish_reason"]
        made = [(call["name"], call["arguments"], call["id"]) for call in calls]
    else:
        [choice] = raw["choices"]
        message, usage, finish = choice["message"], raw["usage"], choice["finish_reason"]
        text, reasoning = message["content"] or "", message.get("reasoning") or ""
        made = [
            (call["function"]["name"], call["function"]["arguments"], call["id"])
            for call in message.get("tool_calls") or []
        ]
    found = Outcome(text, reasoning, [m[:2] for m in made], [m[2] for m in made], finish, raw=raw)
    calls = message.get("builtin_tool_calls") or []
    found.builtin = [(made["type"], made["status"]) for made in calls]
    if usage is not None:
        found.num_input, found.num_output = usage["prompt_tokens"], usage["completion_tokens"]
        found.num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        found.num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    return found


def pieces(chunks: list[Any], key: str) -> list[Any]:
    return [piece for chunk in chunks for c in chunk["choices"] for piece in c["delta"].get(key, ())]


def joined(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for piece in parts:
        entry = found.setdefault(piece["index"], {})
        for key, value in piece.items():
            entry[key] = entry.get(key, "") + value if key in ("arguments", "output") else value
    return list(found.values())


def _read_responses(raw: Any, stream: bool) -> Outcome:
    """Reads a body, or accumulates the deltas of a stream and compares them with its final object."""
    body = raw[-1]["response"] if stream else raw
    found = Outcome(raw=raw)
    texts: list[str] = []
    for item in body["output"]:
        if item["type"] == "function_call":
            found.calls.append((item["name"], item["arguments"]))
            found.call_ids.append(item["call_id"])
        elif item["type"] == "message":
            texts += [part["text"] for part in item["content"]]
        elif item["type"].endswith("_call"):
            found.builtin.append((item["type"], item["status"]))
        elif item["type"] == "reasoning":
            found.reasoning += ("\n\n" if found.reasoning else "") + item["content"][0]["text"]
    found.text = "\n\n".join(text for text in texts if text)
    if stream:
        deltas = [e["delta"] for e in raw if e["type"] == "response.output_text.delta"]
        assert "".join(deltas) == "".join(texts)
    finish = {"completed": "tool_calls" if found.calls else "stop", "incomplete": "length"}
    found.finish = finish[body["status"]]
    usage = body["usage"]
    found.num_input, found.num_output = usage["input_tokens"], usage["output_tokens"]
    found.num_cached = usage["input_tokens_details"]["cached_tokens"]
    found.num_reasoning = usage["output_tokens_details"]["reasoning_tokens"]
    return found


def _read_messages(raw: Any, stream: bool) -> Outcome:
    found = Outcome(raw=raw)
    message = fold_message(raw) if stream else raw
    texts, thoughts = [], []
    for block in message["content"]:
        if block["type"] == "text":
            texts.append(block["text"])
        elif block["type"] == "thinking":
            thoughts.append(block["thinking"])
        else:
            cut = message["stop_reason"] == "max_tokens" and block.get("partial")
            found.calls.append((block["name"], cut or json.dumps(block["input"])))
            found.call_ids.append(block["id"])
    found.text, found.reasoning = "\n\n".join(texts), "\n\n".join(thoughts)
    finish = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls", "stop_sequence": "stop"}
    found.finish = finish[message["stop_reason"]]
    usage = message["usage"]
    found.num_cached, found.num_output = usage["cache_read_input_tokens"], usage["output_tokens"]
    found.num_input = usage["input_tokens"] + found.num_cached
    found.num_reasoning = usage["output_tokens_details"]["thinking_tokens"]
    return found


def fold_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message rebuilt from its events; asserts the API's rules for them.

    A call's block has also the text of its input, as ``partial``: that of a truncated one is not JSON.
    """
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    message: dict[str, Any] = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert events[-1] == {"type": "message_stop"}
    open_index = None
    for event in events[2:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_index is None
            open_index = len(message["content"])
            message["content"].append(event["content_block"])
        assert event["index"] == open_index
        block = message["content"][-1]
        if kind == "content_block_delta":
            delta = event["delta"]
            name = delta["type"].removesuffix("_delta")
            text = delta["partial_json"] if name == "input_json" else delta[name]
            key = "partial" if name == "input_json" else name
            block[key] = block.get(key, "") + text
        elif kind == "content_block_stop":
            open_index = None
            if block["type"] == "tool_use":
                block["input"] = as_object(block.get("partial", ""))
    assert open_index is None
    end = events[-2]
    assert end["type"] == "message_delta"
    return {**message, **end["delta"], "usage": {**message["usage"], **end["usage"]}}


def as_object(text: str) -> dict[str, Any]:
    """Returns arguments as an object, else {}: Messages requires one, and scripts ignore its grammar."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def metric(state: ServerState, name: str, label: str = "") -> float:
    """Returns the sum of a counter's series whose labels contain ``label``."""
    lines = state.metrics.render().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and label in line)


def chosen(script: ScriptedClient, index: int = -1) -> str:
    """Returns the grammar of a request."""
    return script.requests[index].sampling.grammar or ""
