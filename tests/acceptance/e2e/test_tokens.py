"""With the demo model and a seed, render, generate and derender give what the chat endpoint gives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.served import Served

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
SUM = [{"role": "user", "content": "What is 17 + 25?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
CHATS: dict[str, dict[str, Any]] = {
    "reasoning": {"messages": SUM, "n": 2, "temperature": 1, "logprobs": True, "top_logprobs": 3},
    "tools": {"messages": WEATHER, "tools": TOOLS, "return_token_ids": True},
    "required": {"messages": WEATHER, "tools": TOOLS, "tool_choice": "required", "temperature": 1.2},
    "schema": {"messages": SUM, "response_format": {"type": "json_schema", "json_schema": {
        "name": "sum", "schema": SCHEMA}}, "thinking_token_budget": 20},
    "stop": {"messages": SUM, "stop": "42"},
}  # fmt: skip


def comparable(value: Any) -> Any:
    """Returns an answer without ids, times, and how much of the prompt was cached."""
    if isinstance(value, dict):
        left_out = ("id", "created", "prompt_tokens_details")
        return {key: comparable(each) for key, each in value.items() if key not in left_out}
    return [comparable(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", CHATS)
def test_the_way_over_tokens_ends_at_the_same_answer(demo_served: Served, name: str) -> None:
    chat = {"model": "demo", "seed": 11, "max_tokens": 300, **CHATS[name]}
    status, expected = demo_served.ask(CHAT, chat)
    assert status == 200, expected
    _, request = demo_served.ask(f"{CHAT}/render", chat)
    _, generated = demo_served.ask(GENERATE, request)
    asked = {"chat_request": chat, "generate_response": generated, "prompt_token_ids": request["token_ids"]}
    status, found = demo_served.ask(f"{CHAT}/derender", asked)
    assert status == 200, found
    assert comparable(found) == comparable(expected)
    assert found["choices"][0]["finish_reason"] == ("tool_calls" if "tools" in chat else "stop")
    _, at_once = demo_served.ask(GENERATE, {**request, "output_mode": "derender"})
    messages = [choice["message"] for choice in at_once["choices"]]
    assert comparable(messages) == comparable([choice["message"] for choice in expected["choices"]])
