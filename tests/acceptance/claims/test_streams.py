"""Accumulating a stream gives the body, usage included, whatever the model writes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorale.harmony.vocab import RETURN
from tests.support.faces import FACES, WAYS, ask
from tests.support.local_client import LocalClient
from tests.support.scripted import ANALYSIS, FINAL, NEXT, ids, playing
from tests.support.server import served
from tests.turns.test_run_properties import client_of, streams

FUNCTIONS = [{"name": name, "parameters": {"type": "object"}} for name in ("f", "g")]


@settings(max_examples=30, deadline=None, database=None)
@given(tokens=streams(), step=st.integers(1, 64), face=st.sampled_from(["responses", "messages"]))
def test_a_stream_equals_its_body_for_any_step_size(tokens: list[int], step: int, face: str) -> None:
    """``tests/turns/test_run_properties.py`` tests it for Chat."""

    async def main() -> None:
        async with served(client_of(tokens or [RETURN], step)) as server:
            body = await ask(server, face, functions=FUNCTIONS)
            streamed = await ask(server, face, True, functions=FUNCTIONS)
        if face == "messages":  # a body has only whole objects, a stream also the start of a truncated call
            for outcome in (body, streamed):
                outcome.calls = [(name, "") for name, _ in outcome.calls]
        assert body.told() == streamed.told()

    asyncio.run(main())


ANSWER = ANALYSIS + "Think of it." + NEXT + FINAL + "Hi.<|return|>"
LONG = "A prompt of several pages of the cache. " * 30


@pytest.mark.parametrize(("face", "stream"), WAYS)
async def test_usage_counts_the_tokens_of_prompt_answer_and_reasoning(face: str, stream: bool) -> None:
    async with served(playing(ANSWER)) as server:
        extra = {"stream_options": {"include_usage": True}} if face == "chat" and stream else {}
        outcome = await ask(server, face, stream, **extra)
        assert outcome.num_input == len(server.prompt_ids())
        assert (outcome.num_output, outcome.num_reasoning) == (len(ids(ANSWER)), len(ids("Think of it.")))
        assert outcome.num_reasoning + len(ids("Hi.")) <= outcome.num_output


@pytest.mark.parametrize("face", FACES)
async def test_a_second_identical_request_finds_the_cache(client: LocalClient, face: str) -> None:
    async with served(client) as server:
        asked = {"history": (f"{face} {LONG}",), "max_tokens": 8, "seed": 1, "temperature": 0.0}
        first = await ask(server, face, **asked)
        second = await ask(server, face, **asked)
        assert first.num_input == second.num_input
        assert 0 < second.num_cached < second.num_input
        assert first.num_cached < second.num_cached
