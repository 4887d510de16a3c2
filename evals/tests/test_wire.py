"""A conversation of several turns with tools, in the formats of both APIs, and its record in the journal."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest
from chorale_evals.session import Session
from chorale_evals.wire import WIRES, read_chat, read_responses

from chorale.requests.openai_client import AsyncClient, Endpoint
from chorale.requests.usage import TokenUsage

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
FIELDS = {
    "reasoning_effort": "low", "max_tokens": 9, "temperature": 0.5, "top_p": None,
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
}  # fmt: skip
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGE = {"content": None, "reasoning_content": "hm", "tool_calls": [CALL]}
CHAT = {
    "choices": [{"message": MESSAGE, "finish_reason": "tool_calls"}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}},
    "system_fingerprint": "fp_1",
}  # fmt: skip
RESPONSE = {
    "status": "completed",
    "output": [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    ],
    "usage": {"input_tokens": 4, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}},
}


HISTORY = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "ok"},
]


def asked(api: Any, answer: dict[str, Any]) -> tuple[dict[str, Any], Session]:
    """Returns the body of a request and its session."""
    bodies: list[dict[str, Any]] = []

    def respond(request: httpx2.Request) -> httpx2.Response:
        bodies.append(json.loads(request.content))
        return httpx2.Response(200, json=answer)

    client = AsyncClient(Endpoint(), transport=httpx2.MockTransport(respond))
    session = Session(client, WIRES[api], "m", FIELDS)
    asyncio.run(session.ask(HISTORY, tools=[TOOL], max_tokens=5))
    return bodies[0], session


def test_chat_sends_messages_and_fields_unchanged() -> None:
    body, session = asked("chat", CHAT)
    fields = {name: value for name, value in FIELDS.items() if value is not None} | {"max_tokens": 5}
    assert body == {"model": "m", "messages": HISTORY, "tools": [TOOL], **fields}
    assert session.usage == TokenUsage(4, 3, 2)
    assert session.fingerprint == "fp_1"


def test_responses_sends_items_and_its_own_field_names() -> None:
    body, session = asked("responses", RESPONSE)
    assert body == {
        "model": "m", "store": False, "temperature": 0.5, "max_output_tokens": 5,
        "reasoning": {"effort": "low"}, "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}],
        "input": [
            {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        ],
    }  # fmt: skip
    assert session.usage == TokenUsage(4, 3, 2)
    assert session.finish_reason == "tool_calls"
    [exchange] = session.exchanges
    assert (exchange["messages"], exchange["fields"]["max_tokens"]) == (HISTORY, 5)
    assert list(exchange["reply"]["tool_calls"]) == [{"id": "c1", "name": "f", "arguments": "{}"}]


@pytest.mark.parametrize(
    "answer", [{}, {"choices": []}, {"choices": [{}]}, {"choices": "x"}, {"choices": [None]}]
)
def test_an_answer_that_is_not_a_chat_completion_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a chat completion"):
        read_chat(answer)


def test_a_response_has_a_finish_reason_for_each_end() -> None:
    def end(**more: Any) -> str:
        return read_responses({"output": [], **more}).finish_reason

    assert end(status="completed") == "stop"
    assert end(status="incomplete", incomplete_details={"reason": "max_output_tokens"}) == "length"
    assert end(status="incomplete", incomplete_details={"reason": "content_filter"}) == "content_filter"
    with pytest.raises(ValueError, match="the response failed: broken"):
        end(status="failed", error={"message": "broken"})
    with pytest.raises(ValueError, match="not a response"):
        read_responses({"output": [{"type": "message"}]})
