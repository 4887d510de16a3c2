"""The fold of the stream is the body, whatever the model wrote and however many tokens come at once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorale.testing.scripted_client import Script, ScriptedClient
from tests.support.faces import FACES, WEATHER, ask
from tests.support.scripted import ANALYSIS, FINAL, NEXT, PREAMBLE, call, ids
from tests.support.server import VOCAB, Server, served, with_server

PIECES = [
    "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|start|>assistant", "<|return|>", "<|call|>",
    "<|constrain|>", "analysis", "commentary", "final", " to=functions.get_weather", " json", '{"city":"Par',
    'is"}', "Hello", " there", "\n\n", "\u6f22\u5b57", "\U0001f600", "stop here",
]  # fmt: skip
WHOLE = [
    ANALYSIS + "Think." + NEXT + FINAL + "Hello.<|return|>",
    ANALYSIS + "Think." + NEXT + PREAMBLE + "Wait." + NEXT + call("get_weather", "{}") + "<|call|>",
    ANALYSIS + "only thoughts<|return|>",
    FINAL + "a" + NEXT + FINAL + "b<|return|>",
    call("get_weather", '{"city": "Pa'),
    "<|start|>assistant" + FINAL,
    "",
]
soup = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)


def stepping(script: str, step: int) -> ScriptedClient:
    return ScriptedClient(
        lambda request, index: Script(ids(script) or VOCAB.encode(" "), tokens_per_step=step)
    )


async def compare(running: Server, face: str) -> None:
    body = await ask(running, face, functions=[WEATHER])
    extra = {"stream_options": {"include_usage": True}} if face == "chat" else {}
    streamed = await ask(running, face, True, functions=[WEATHER], **extra)
    if face == "messages":  # a body has objects only; a cut call's stream has what was written of it
        for outcome in (body, streamed):
            outcome.calls = [(name, "") for name, _ in outcome.calls]
    assert body.told() == streamed.told()


@settings(max_examples=40, deadline=None, database=None)
@given(script=st.one_of(st.sampled_from(WHOLE), soup), step=st.integers(1, 64), face=st.sampled_from(FACES))
def test_any_stream_in_any_steps(script: str, step: int, face: str) -> None:
    async def main() -> None:
        async with served(stepping(script, step)) as running:
            await compare(running, face)

    asyncio.run(main())


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("interval", [1, 5, 20])
def test_the_stream_interval_changes_no_content(face: str, interval: int) -> None:
    with_server(stepping(WHOLE[1], 3), lambda running: compare(running, face), stream_interval=interval)
