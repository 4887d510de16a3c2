"""Answers satisfy their schema at every effort, through every API, streamed or not, with tools present.

Two hundred through Chat and Responses are in ``acceptance/structured`` (a thousand with ``-m slow``); this
is each face, effort and way once, from a random model at temperature 1.
"""

from __future__ import annotations

import json

import pytest

from tests.support.faces import WAYS, WEATHER, ask
from tests.support.local_client import LocalClient
from tests.support.schema_cases import BIAS, SCHEMAS, valid
from tests.support.server import Server, with_server

NAMES = ["boolean", "enum", "integer"]


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_every_answer_is_valid(engine: LocalClient, face: str, stream: bool, effort: str) -> None:
    async def main(server: Server) -> None:
        name = NAMES[(len(effort) + len(face) + stream) % len(NAMES)]
        schema = SCHEMAS[name]
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

    with_server(engine, main)
