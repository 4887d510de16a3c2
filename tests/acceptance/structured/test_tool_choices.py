"""A forced call is guaranteed, its arguments satisfy the schema; "none" never yields one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.grammar.schema_cases import BIAS, obj, valid
from tests.support.grammar.structured import choose, response_to, run
from tests.support.local_client import LocalClient
from tests.support.server import VOCAB, Server

SCHEMAS = {
    "get": obj(city={"type": "string", "maxLength": 8}, n={"type": "integer", "minimum": 0, "maximum": 9}),
    "get_weather": obj(unit={"enum": ["c", "f"]}),
    "ping": None,
}
FLAT = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
NESTED = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]

# (the choice as Chat writes it, as Responses writes it, what may be called)
FORCED: list[tuple[Any, Any, set[str]]] = [
    ({"type": "function", "function": {"name": "ping"}}, {"type": "function", "name": "ping"}, {"ping"}),
    (
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": name}} for name in ("get", "ping")],
            },
        },
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": name} for name in ("get", "ping")],
        },
        {"get", "ping"},
    ),
]


def check_call(name: str, arguments: str, allowed: set[str]) -> None:
    assert name in allowed
    value = json.loads(arguments)
    assert valid(value, SCHEMAS[name]) if SCHEMAS[name] is not None else value == {}
    assert "<|" not in arguments


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", FORCED, ids=["no_parameters", "allowed_tools"])
def test_a_forced_call_comes(client: LocalClient, case: tuple[Any, Any, set[str]], stream: bool) -> None:
    chat_choice, responses_choice, allowed = case
    common: dict[str, Any] = {"logit_bias": BIAS, "stream": stream, "parallel_tool_calls": False}

    async def chat(server: Server, seed: int) -> None:
        choice = await choose(
            server,
            tools=NESTED,
            tool_choice=chat_choice,
            seed=seed,
            max_tokens=400,
            **common,
        )
        assert choice["finish_reason"] == "tool_calls"
        assert not choice["message"]["content"]
        (made,) = choice["message"]["tool_calls"]
        check_call(made["function"]["name"], made["function"]["arguments"], allowed)

    async def respond(server: Server, seed: int) -> None:
        response = await response_to(
            server,
            tools=FLAT,
            tool_choice=responses_choice,
            seed=seed,
            max_output_tokens=400,
            **common,
        )
        assert response["status"] == "completed"
        assert response["tool_choice"] == responses_choice
        (made,) = [item for item in response["output"] if item["type"] != "reasoning"]
        assert made["type"] == "function_call"
        check_call(made["name"], made["arguments"], allowed)

    async def main(server: Server) -> None:
        await asyncio.gather(*(one(server, seed) for seed in range(2) for one in (chat, respond)))

    run(client, main)


# Control tokens are likely here: without a grammar most turns would be calls, or malformed.
LURES = {
    str(token): 13.0 for token in VOCAB.encode_with_special("<|call|><|end|><|return|><|constrain|>")
} | {str(token): 9.0 for token in VOCAB.encode_with_special(' to=functions.get<|channel|>commentary{"}')}


def seeds(count: int, one: Callable[[Server, int], Any]) -> Callable[[Server], Any]:
    async def main(server: Server) -> list[Any]:
        return list(await asyncio.gather(*(one(server, seed) for seed in range(count))))

    return main


def test_strict_functions_bind_when_they_are_called(client: LocalClient) -> None:
    tools = [{**tool, "strict": tool["name"] != "ping"} for tool in FLAT]

    async def one(server: Server, seed: int) -> str:
        response = await response_to(
            server,
            tools=tools,
            seed=seed,
            logit_bias=LURES | BIAS,
            max_output_tokens=400,
        )
        for item in response["output"]:
            if item["type"] == "function_call" and item["status"] == "completed" and item["name"] != "ping":
                check_call(item["name"], item["arguments"], set(SCHEMAS))
                return "call"
        return "other"

    found = run(client, seeds(16, one))
    assert found.count("call") >= 2


def test_allowed_tools_with_mode_auto_close_the_others(client: LocalClient) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "ping"}]}

    async def one(server: Server, seed: int) -> set[str]:
        fields: dict[str, Any] = {"seed": seed, "logit_bias": LURES, "max_output_tokens": 120}
        response = await response_to(server, tools=FLAT, tool_choice=choice, **fields)
        return {item["name"] for item in response["output"] if item["type"] == "function_call"}

    found = set().union(*run(client, seeds(16, one)))
    assert found == {"ping"}
