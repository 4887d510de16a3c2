"""On every API a demanded call is made with valid arguments, and "none" prevents calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.faces import FACES, WAYS, Outcome, ask
from tests.support.grammar.schema_cases import BIAS, obj, valid
from tests.support.grammar.structured import answering
from tests.support.local_client import LocalClient
from tests.support.scripted import FINAL, playing
from tests.support.server import VOCAB, served

SCHEMAS = {
    "get": obj(city={"type": "string", "maxLength": 8}, n={"type": "integer", "minimum": 0, "maximum": 9}),
    "get_weather": obj(unit={"enum": ["c", "f"]}),
    "ping": obj(),
}
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
# name -> (fields of the request by API, functions that may be called).
CHOICES: dict[str, tuple[Callable[[str], dict[str, Any]], set[str]]] = {
    "none": (lambda face: {"choice": "none"}, set()),
    "required": (lambda face: {"choice": "required"}, set(SCHEMAS)),
    "named": (lambda face: {"choice": ("get_weather",)}, {"get_weather"}),
    "named, without parameters": (lambda face: {"choice": ("ping",)}, {"ping"}),
    "allowed": (lambda face: allowing(face, "required", "get", "ping"), {"get", "ping"}),
}


def allowing(face: str, mode: str, *names: str) -> dict[str, Any]:
    """Returns the fields for ``allowed_tools``, which Messages does not have."""
    if face == "chat":
        tools: list[Any] = [{"type": "function", "function": {"name": name}} for name in names]
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    else:
        tools = [{"type": "function", "name": name} for name in names]
        allowed = {"type": "allowed_tools", "mode": mode, "tools": tools}
    return {"tool_choice": allowed}


def check_call(name: str, arguments: str, allowed: set[str]) -> None:
    assert name in allowed
    assert valid(json.loads(arguments), SCHEMAS[name])
    assert "<|" not in arguments


@pytest.mark.parametrize("form", CHOICES)
async def test_a_demanded_function_is_called(client: LocalClient, form: str) -> None:
    fields_of, allowed = CHOICES[form]
    ways = [(face, {"stream": stream}) for face, stream in WAYS if form != "allowed" or face != "messages"]
    ways.append(("responses", {"background": True}))

    async with answering(client) as server:

        async def one(face: str, seed: int, fields: dict[str, Any]) -> None:
            fields = {**fields, **fields_of(face), "seed": seed, "logit_bias": BIAS}
            found = await ask(server, face, functions=FUNCTIONS, max_tokens=400 if allowed else 40, **fields)
            if not allowed:
                assert found.calls == []
                return
            [(name, arguments)] = found.calls
            assert (found.finish, found.text) == ("tool_calls", "")
            check_call(name, arguments, allowed)

        await asyncio.gather(*(one(face, seed, fields) for seed, (face, fields) in enumerate(ways)))


# These biases make control tokens likely: without a grammar most turns would be calls, or malformed.
LURES = {
    str(token): 13.0 for token in VOCAB.encode_with_special("<|call|><|end|><|return|><|constrain|>")
} | {str(token): 9.0 for token in VOCAB.encode_with_special(' to=functions.get<|channel|>commentary{"}')}


async def sixteen(client: LocalClient, face: str, asked: dict[str, Any], **options: Any) -> list[Outcome]:
    """Returns the answers for sixteen seeds. ``options``: fields of ``ServerConfig``."""
    async with answering(client, **options) as server:
        return await asyncio.gather(*(ask(server, face, seed=seed, **asked) for seed in range(16)))


async def test_strict_functions_bind_when_they_are_called(client: LocalClient) -> None:
    tools = [{**function, "strict": function["name"] != "ping"} for function in FUNCTIONS]
    asked = {"functions": tools, "logit_bias": LURES | BIAS, "max_tokens": 400}
    answers = await sixteen(client, "responses", asked)
    called = [call for found in answers if found.finish != "length" for call in found.calls]
    bound = [call for call in called if call[0] != "ping"]
    assert len(bound) >= 2
    for name, arguments in bound:
        check_call(name, arguments, set(SCHEMAS))


async def test_allowed_tools_with_mode_auto_close_the_others(client: LocalClient) -> None:
    choice = allowing("responses", "auto", "ping")
    asked = {"functions": FUNCTIONS, "logit_bias": LURES, "max_tokens": 120, **choice}
    answers = await sixteen(client, "responses", asked)
    assert {name for found in answers for name, _ in found.calls} == {"ping"}


@pytest.mark.parametrize(("face", "level"), [("chat", "function"), ("messages", "parameter")])
async def test_the_level_of_the_operator_binds_all_calls(client: LocalClient, face: str, level: str) -> None:
    """``strict`` is not in the request. At the level "function" the arguments are any text.

    That every API sends the grammar is proved below.
    """
    asked = {"functions": FUNCTIONS, "logit_bias": LURES | BIAS, "max_tokens": 200}
    answers = await sixteen(client, face, asked, tool_strict_level=level)
    called = [call for found in answers if found.finish != "length" for call in found.calls]
    assert len(called) >= 2
    for name, arguments in called:
        assert name in SCHEMAS
        if level == "parameter":
            check_call(name, arguments, set(SCHEMAS))


@pytest.mark.parametrize("face", FACES)
async def test_the_level_needs_functions_and_a_new_message(face: str) -> None:
    more = {} if face == "messages" else {"continue_final_message": True}
    client = playing(FINAL + "ok<|return|>")
    async with served(client, tool_strict_level="parameter") as server:
        await ask(server, face, functions=FUNCTIONS)
        assert client.requests[-1].sampling.grammar
        await ask(server, face)
        assert not client.requests[-1].sampling.grammar
        await ask(server, face, functions=FUNCTIONS, history=("2 + 2?", ("assistant", "It is", "")), **more)
        assert not client.requests[-1].sampling.grammar
