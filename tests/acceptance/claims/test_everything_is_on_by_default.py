"""A bare ``serve MODEL`` has tools, reasoning and storage on; flags that others need change nothing."""

from __future__ import annotations

import pytest

from chorale.cli.options.settings import merge
from tests.support.faces import WAYS, WEATHER, ask, send
from tests.support.scripted import ANALYSIS, NEXT, call, playing
from tests.support.server import Server, with_server

OTHERS = ["--enable-auto-tool-choice", "--tool-call-parser", "openai", "--reasoning-parser", "openai_gptoss"]


def test_flags_of_others_are_accepted_without_effect() -> None:
    bare, flagged = merge(["demo"], {}), merge(["demo", *OTHERS], {})
    assert (bare.engine, bare.server) == (flagged.engine, flagged.server)


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_a_bare_server_parses_reasoning_and_calls(face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream, functions=[WEATHER])
        assert (outcome.reasoning, outcome.calls) == ("Think.", [("get_weather", "{}")])
        assert outcome.finish == "tool_calls"

    with_server(playing(ANALYSIS + "Think." + NEXT + call("get_weather", "{}") + "<|call|>"), main)


def test_a_bare_server_stores() -> None:
    async def main(server: Server) -> None:
        made = (await send(server, "responses", {"input": "hi"})).json()
        assert made["store"] is True
        assert (await server.http.get(f"/v1/responses/{made['id']}")).json()["id"] == made["id"]

    with_server(playing(ANALYSIS + "T." + NEXT + "<|channel|>final<|message|>ok<|return|>"), main)
