"""A demanded call comes, answers satisfy their schema, "none" never calls; a random model writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.faces import WAYS, WEATHER, ask
from tests.support.grammar.schema_cases import BIAS, SCHEMAS, valid
from tests.support.local_client import LocalClient
from tests.support.server import Server, with_server

ON: dict[str, Any] = {
    "name": "turn_on",
    "parameters": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}
OTHER = {**ON, "name": "turn_off"}
FREE = {"temperature": 1.0, "seed": 3, "logit_bias": BIAS}


@pytest.mark.parametrize("choice", ["required", ("turn_on",)], ids=["required", "named"])
@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_a_forced_call_comes(client: LocalClient, face: str, stream: bool, choice: Any) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(
            server, face, stream, functions=[ON, OTHER], choice=choice, max_tokens=200, **FREE
        )
        [(name, arguments)] = outcome.calls
        assert name in ("turn_on", "turn_off") if choice == "required" else name == "turn_on"
        assert list(json.loads(arguments)) == ["on"]
        assert outcome.finish == "tool_calls"

    with_server(client, main)


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_none_never_calls(client: LocalClient, face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream, functions=[ON], choice="none", max_tokens=60, **FREE)
        assert outcome.calls == []
        assert outcome.finish in ("stop", "length")

    with_server(client, main)


NAMES = ["boolean", "enum", "integer"]


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_every_answer_is_valid(client: LocalClient, face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        place = (len(face) + stream) % len(NAMES)
        schema, effort = SCHEMAS[NAMES[place]], ("low", "medium", "high")[place]
        flat = {"type": "json_schema", "schema": schema}
        nested = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        shapes = {
            "chat": {"response_format": nested, "reasoning_effort": effort},
            "responses": {"text": {"format": {**flat, "name": "a"}}, "reasoning": {"effort": effort}},
            "messages": {"output_config": {"format": flat, "effort": effort}},
        }
        fields = {"temperature": 1.0, "seed": 5, "logit_bias": BIAS, **shapes[face]}
        outcome = await ask(
            server, face, stream, functions=[WEATHER], choice="none", max_tokens=200, **fields
        )
        assert outcome.finish == "stop", outcome
        assert valid(json.loads(outcome.text), schema)

    with_server(client, main)
