"""After <|end|> or <|call|> a missing <|start|>assistant is implied."""

from __future__ import annotations

import pytest

from tests.support.faces import WAYS, WEATHER, ask
from tests.support.scripted import ANALYSIS, FINAL, call, playing
from tests.support.server import Server, with_server

CALL = call("get_weather", "{}") + "<|call|>"


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_an_answer_or_a_call_without_its_start(face: str, stream: bool) -> None:
    async def answer(server: Server) -> None:
        outcome = await ask(server, face, stream)
        assert (outcome.reasoning, outcome.text, outcome.finish) == ("Think.", "Hi.", "stop")

    async def made(server: Server) -> None:
        outcome = await ask(server, face, stream, functions=[WEATHER])
        assert (outcome.reasoning, outcome.calls) == ("Think.", [("get_weather", "{}")])

    with_server(playing(ANALYSIS + "Think.<|end|>" + FINAL + "Hi.<|return|>"), answer)
    with_server(playing(ANALYSIS + "Think.<|end|>" + CALL), made)
    bare = "<|end|>commentary to=functions.get_weather<|message|>{}<|call|>"
    with_server(playing(ANALYSIS + "Think." + bare), made)
