"""A malformed message header never fails a request; it is read as best it can be, and counted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.faces import WAYS, WEATHER, ask, metric
from tests.support.scripted import FINAL, NEXT, playing
from tests.support.server import Server, with_server

BODY = '<|message|>{"city":"Paris"}<|call|>'
CALLS = {
    "two recipients": "<|channel|>commentary to=functions.get_weather to=functions.get_weather",
    "junk before": "<|channel|>commentary wants the weather to=functions.get_weather",
    "two channels": "<|channel|>commentary to=functions.get_weather<|channel|>commentary json",
    "recipient then channel twice": " to=functions.get_weather<|channel|>analysis<|channel|>commentary",
    "another name first": "<|channel|>commentary to=nobody to=functions.get_weather <|constrain|>json",
}
TEXTS = {
    "type as recipient": "<|channel|>final <|constrain|>json<|message|>{}<|return|>",
    "unknown channel": "<|channel|>comment<|message|>x" + NEXT + FINAL + "{}<|return|>",
    "words in the header": "<|channel|>final and so on<|message|>{}<|return|>",
}


@pytest.mark.parametrize("script", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_the_call_arrives(face: str, stream: bool, script: str) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream, functions=[WEATHER])
        [(name, arguments)] = outcome.calls
        assert (name, arguments.replace(" ", "")) == ("get_weather", '{"city":"Paris"}')
        assert outcome.finish == "tool_calls"
        assert metric(server.state, "chorale:harmony_repairs_total") >= 1

    with_server(playing(script + BODY), main)


@pytest.mark.parametrize("script", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_the_text_arrives(face: str, stream: bool, script: str) -> None:
    async def main(server: Server) -> Any:
        return await ask(server, face, stream, functions=[WEATHER])

    outcome = with_server(playing(script), main)
    assert outcome.text.endswith("{}")
    assert outcome.calls == []
