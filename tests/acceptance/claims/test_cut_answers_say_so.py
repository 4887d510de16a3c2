"""What the limit cut says so: length, incomplete, max_tokens; partial text and arguments are kept."""

from __future__ import annotations

import pytest

from tests.support.faces import WAYS, WEATHER, ask
from tests.support.scripted import ANALYSIS, FINAL, NEXT, call, playing
from tests.support.server import Server, with_server

HEADER = ANALYSIS + "T." + NEXT + "<|channel|>fin"


@pytest.mark.parametrize(
    ("script", "text", "arguments"),
    [
        (FINAL + "Half of an ans", "Half of an ans", None),
        (HEADER, "", None),
        (call("get_weather", '{"ci'), "", '{"ci'),
    ],
    ids=["text", "header", "arguments"],
)
@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_a_cut_is_told(face: str, stream: bool, script: str, text: str, arguments: str | None) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream, functions=[WEATHER])
        assert (outcome.text, outcome.finish) == (text, "length")
        if arguments is not None and (face != "messages" or stream):
            assert outcome.calls == [("get_weather", arguments)]
        if face == "responses":
            body = outcome.raw[-1]["response"] if stream else outcome.raw
            assert body["incomplete_details"] == {"reason": "max_output_tokens"}
            if script != HEADER:
                assert body["output"][-1]["status"] == "incomplete"
            if stream:
                assert outcome.raw[-1]["type"] == "response.incomplete"

    with_server(playing(script), main)
