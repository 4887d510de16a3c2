"""A demanded call comes and its arguments are valid; "none" never calls; a cut one says length."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.faces import WAYS, ask
from tests.support.local_client import LocalClient
from tests.support.schema_cases import BIAS
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
def test_a_forced_call_comes(engine: LocalClient, face: str, stream: bool, choice: Any) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(
            server, face, stream, functions=[ON, OTHER], choice=choice, max_tokens=200, **FREE
        )
        [(name, arguments)] = outcome.calls
        assert name in ("turn_on", "turn_off") if choice == "required" else name == "turn_on"
        assert list(json.loads(arguments)) == ["on"]
        assert outcome.finish == "tool_calls"

    with_server(engine, main)


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_none_never_calls(engine: LocalClient, face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream, functions=[ON], choice="none", max_tokens=60, **FREE)
        assert outcome.calls == []
        assert outcome.finish in ("stop", "length")

    with_server(engine, main)


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_a_forced_call_without_budget_is_length(engine: LocalClient, face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream, functions=[ON], choice="required", max_tokens=4, **FREE)
        assert outcome.finish == "length"

    with_server(engine, main)
