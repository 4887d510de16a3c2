"""Accumulating a stream gives the body, usage included, whatever the model writes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorale.harmony.vocab import RETURN
from tests.support.faces import FACES, WAYS, ask
from tests.support.fuzz.random_turns import client_of, streams
from tests.support.local_client import LocalClient
from tests.support.scripted import ANALYSIS, FINAL, NEXT, fold_chat, ids, playing
from tests.support.server import served

FUNCTIONS = [{"name": name, "parameters": {"type": "object"}} for name in ("f", "g")]


@settings(max_examples=80, deadline=None, database=None)
@given(
    tokens=streams(),
    step=st.integers(1, 64),
    interval=st.sampled_from([1, 3, 20]),
    face=st.sampled_from(FACES),
    stops=st.booleans(),
    scores=st.booleans(),
)
def test_a_stream_equals_its_body_for_any_step_size(
    tokens: list[int], step: int, interval: int, face: str, stops: bool, scores: bool
) -> None:
    asked: dict[str, Any] = {"functions": FUNCTIONS}
    if stops:
        asked["stop_sequences" if face == "messages" else "stop"] = ["STOP"]
    if face == "chat":
        asked["logprobs"] = scores

    async def main() -> None:
        tail = {"stream_options": {"include_usage": True}} if face == "chat" else {}
        async with served(client_of(tokens or [RETURN], 1), stream_interval=interval) as server:
            body = await ask(server, face, **asked)
        async with served(client_of(tokens or [RETURN], step), stream_interval=interval) as server:
            streamed = await ask(server, face, True, **asked, **tail)
        for name, arguments in streamed.calls:
            assert name in ("f", "g")
            assert arguments or streamed.finish == "length"
        if face == "messages":  # a body has only whole objects, a stream also the start of a truncated call
            for outcome in (body, streamed):
                outcome.calls = [(name, "") for name, _ in outcome.calls]
        assert body.told() == streamed.told()
        if face == "chat":
            [choice] = body.raw["choices"]
            shown = (choice["logprobs"] or {}).get("content") or []
            assert fold_chat(streamed.raw)[0]["logprobs"] == shown
            assert body.num_reasoning + len(shown) <= body.num_output

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
