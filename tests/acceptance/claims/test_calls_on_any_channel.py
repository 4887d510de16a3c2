"""A call is found by its recipient, on whichever channel it was written."""

from __future__ import annotations

import pytest

from tests.support.faces import WAYS, WEATHER, ask
from tests.support.scripted import call, playing
from tests.support.server import Server, with_server


@pytest.mark.parametrize("channel", ["analysis", "commentary", "final"])
@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_a_call_is_a_call(face: str, stream: bool, channel: str) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream, functions=[WEATHER])
        assert outcome.calls == [("get_weather", "{}")]
        assert (outcome.text, outcome.reasoning, outcome.finish) == ("", "", "tool_calls")

    with_server(playing(call("get_weather", "{}", channel) + "<|call|>"), main)
