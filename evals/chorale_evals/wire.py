"""Requests and replies in the formats of Chat Completions and of Responses, without I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from chorale.requests.usage import TokenUsage, usage_of

Api = Literal["chat", "responses"]
Message = dict[str, Any]  # in Chat Completions format


def strictly(text: str) -> Any:
    """Parses JSON. Raises ``ValueError`` also for repeated names, NaN and infinities."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call of the model. ``arguments``: as the server sent them, possibly invalid JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model.

    ``finish_reason``: "stop", "length", "tool_calls" or "content_filter". ``text`` is "" if there is none.
    """

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    usage: TokenUsage = field(default_factory=TokenUsage)

    @property
    def graded(self) -> str:
        """Returns the text, or the calls as JSON: ``[{"name": ..., "arguments": {...}}]``."""
        if not self.tool_calls:
            return self.text
        calls = []
        for call in self.tool_calls:
            try:
                arguments = strictly(call.arguments)
            except (ValueError, RecursionError):
                arguments = call.arguments
            calls.append({"name": call.name, "arguments": arguments})
        return json.dumps(calls, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Wire:
    """The format of one API: ``body(model, messages, fields)`` makes a request, ``read(answer)`` a reply.

    ``read`` raises ``ValueError`` if the answer does not have this format.
    """

    path: str
    body: Callable[[str, Sequence[Message], dict[str, Any]], dict[str, Any]]
    read: Callable[[dict[str, Any]], Reply]


def chat_body(model: str, messages: Sequence[Message], fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "messages": list(messages), **fields}


def read_chat(answer: dict[str, Any]) -> Reply:
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        calls = tuple(
            ToolCall(str(call["id"]), str(call["function"]["name"]), str(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        )
        text = str(message.get("content") or "")
        reasoning = str(message.get("reasoning") or message.get("reasoning_content") or "")
        finish = str(choice.get("finish_reason") or "stop")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a chat completion ({type(error).__name__}: {error})") from None
    return Reply(text, reasoning, calls, finish, usage_of(answer))


def responses_body(model: str, messages: Sequence[Message], fields: dict[str, Any]) -> dict[str, Any]:
    items = [item for message in messages for item in _items(message)]
    body: dict[str, Any] = {"model": model, "store": False, "input": items}
    for name, value in fields.items():
        match name:
            case "reasoning_effort":
                body["reasoning"] = {"effort": value}
            case "max_tokens" | "max_completion_tokens":
                body["max_output_tokens"] = value
            case "response_format":
                body["text"] = {"format": {"type": value["type"], **value.get("json_schema", {})}}
            case "tools":
                body["tools"] = [{"type": "function", **tool["function"]} for tool in value]
            case "tool_choice" if isinstance(value, dict):
                body["tool_choice"] = {"type": "function", **value["function"]}
            case _:
                body[name] = value
    return body


def _items(message: Message) -> list[dict[str, Any]]:
    """Converts a message of Chat Completions to input items of Responses."""
    role, content = message["role"], message.get("content")
    if role == "tool":
        output = content if isinstance(content, str) else json.dumps(content)
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}]
    items: list[dict[str, Any]] = []
    if message.get("reasoning"):
        parts = [{"type": "reasoning_text", "text": message["reasoning"]}]
        items.append({"type": "reasoning", "summary": [], "content": parts})
    if content is not None:
        items.append({"role": role, "content": content})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        items.append({"type": "function_call", "call_id": call["id"], **function})
    return items


def read_responses(answer: dict[str, Any]) -> Reply:
    try:
        text: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for item in answer["output"]:
            if item["type"] == "message":
                text += [str(part.get("text") or part.get("refusal") or "") for part in item["content"]]
            elif item["type"] == "reasoning":
                reasoning += [str(part["text"]) for part in item.get("content") or item.get("summary") or ()]
            elif item["type"] == "function_call":
                calls.append(ToolCall(str(item["call_id"]), str(item["name"]), str(item["arguments"])))
        finish = _finish(answer, bool(calls))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a response ({type(error).__name__}: {error})") from None
    return Reply("".join(text), "\n".join(reasoning), tuple(calls), finish, usage_of(answer))


def _finish(answer: dict[str, Any], has_calls: bool) -> str:
    match answer:
        case {"status": "failed"}:
            raise ValueError(f"the response failed: {(answer.get('error') or {}).get('message')}")
        case {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}:
            return "content_filter"
        case {"status": "incomplete"}:
            return "length"
    return "tool_calls" if has_calls else "stop"


WIRES: dict[Api, Wire] = {
    "chat": Wire("chat/completions", chat_body, read_chat),
    "responses": Wire("responses", responses_body, read_responses),
}
