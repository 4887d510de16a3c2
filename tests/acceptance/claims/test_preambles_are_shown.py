"""Commentary without a recipient is shown: part of the content, a message of its own in Responses."""

from __future__ import annotations

import pytest

from tests.support.faces import WAYS, WEATHER, ask
from tests.support.scripted import FINAL, NEXT, PREAMBLE, call, playing
from tests.support.server import Server, with_server


@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_a_preamble_is_shown(face: str, stream: bool, with_tools: bool) -> None:
    after = call("get_weather", "{}") + "<|call|>" if with_tools else FINAL + "Done.<|return|>"

    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream, functions=[WEATHER] if with_tools else [])
        assert outcome.text == ("I will look." if with_tools else "I will look.\n\nDone.")
        assert len(outcome.calls) == with_tools
        if face == "responses":
            body = outcome.raw[-1]["response"] if stream else outcome.raw
            assert body["output"][0]["phase"] == "commentary"

    with_server(playing(PREAMBLE + "I will look." + NEXT + after), main)
