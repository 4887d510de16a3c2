"""Tools described in the prompt pass through as text, tags and all; a truncated call is not lost."""

from __future__ import annotations

import pytest

from tests.support.faces import WAYS, WEATHER, ask
from tests.support.scripted import FINAL, call, playing
from tests.support.server import Server, with_server

XML = "<read_file>\n<path>src/a.py</path>\n</read_file>\n<thinking>x</thinking> <tool_call>{}</tool_call>"


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_tags_pass_through(face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(
            server, face, stream, instructions="Tools: <read_file><path>...</path></read_file>"
        )
        assert (outcome.text, outcome.finish, outcome.calls) == (XML, "stop", [])
        assert "<read_file><path>...</path></read_file>" in server.prompt()

    with_server(playing(FINAL + XML + "<|return|>"), main)


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_a_truncated_call_is_length(face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream, functions=[WEATHER])
        assert outcome.finish == "length"
        [(name, arguments)] = outcome.calls
        assert name == "get_weather"
        if face != "messages" or stream:  # a body of that API has whole objects only
            assert arguments == '{"city": "Pa'

    with_server(playing(call("get_weather", '{"city": "Pa')), main)
