"""Two calls of one turn are two, with ids of their own; with two results they are rendered in pairs."""

from __future__ import annotations

import pytest

from tests.support.faces import FACES, WAYS, WEATHER, Call, ask
from tests.support.scripted import FINAL, call, playing
from tests.support.server import Server, with_server

NEXT_CALL = "<|call|><|start|>assistant"
TWO = (
    call("get_weather", '{"city": "Rome"}') + NEXT_CALL + call("get_weather", '{"city": "Oslo"}') + "<|call|>"
)


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_two_calls_arrive(face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream, functions=[WEATHER])
        assert outcome.calls == [("get_weather", '{"city": "Rome"}'), ("get_weather", '{"city": "Oslo"}')]
        assert len(set(outcome.call_ids)) == 2
        assert outcome.finish == "tool_calls"

    with_server(playing(TWO), main)


@pytest.mark.parametrize("face", ["chat", "responses"])
def test_one_at_a_time_if_asked(face: str) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, functions=[WEATHER], parallel_tool_calls=False)
        assert outcome.calls == [("get_weather", '{"city": "Rome"}')]

    with_server(playing(TWO), main)


@pytest.mark.parametrize("face", FACES)
def test_results_follow_their_calls(face: str) -> None:
    async def main(server: Server) -> None:
        pairs = [
            Call(arguments='{"city":"Rome"}', result="30"),
            Call(arguments='{"city":"Oslo"}', result="5"),
        ]
        await ask(server, face, history=("hi", *pairs), functions=[WEATHER])
        prompt = server.prompt()
        found = [prompt.index(text) for text in ('"Rome"', "30<|end|>", '"Oslo"', "5<|end|>")]
        assert found == sorted(found)

    with_server(playing(FINAL + "ok<|return|>"), main)
