"""Usage is real everywhere: reasoning and cached tokens, and the same at the end of a stream."""

from __future__ import annotations

import pytest

from tests.support.faces import FACES, WAYS, ask
from tests.support.local_client import LocalClient
from tests.support.scripted import ANALYSIS, FINAL, NEXT, ids, playing
from tests.support.server import Server, with_server

ANSWER = ANALYSIS + "Think of it." + NEXT + FINAL + "Hi.<|return|>"
LONG = "A prompt of several pages of the cache. " * 30


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_the_counts(face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        extra = {"stream_options": {"include_usage": True}} if face == "chat" and stream else {}
        outcome = await ask(server, face, stream, **extra)
        assert outcome.num_input == len(server.prompt_ids())
        assert (outcome.num_output, outcome.num_reasoning) == (len(ids(ANSWER)), len(ids("Think of it.")))
        assert outcome.num_reasoning + len(ids("Hi.")) <= outcome.num_output

    with_server(playing(ANSWER), main)


@pytest.mark.parametrize("face", FACES)
def test_a_second_identical_request_finds_the_cache(engine: LocalClient, face: str) -> None:
    async def main(server: Server) -> None:
        asked = {"history": (f"{face} {LONG}",), "max_tokens": 8, "seed": 1, "temperature": 0.0}
        first = await ask(server, face, **asked)
        second = await ask(server, face, **asked)
        assert first.num_input == second.num_input
        assert 0 < second.num_cached < second.num_input
        assert first.num_cached < second.num_cached

    with_server(engine, main)
