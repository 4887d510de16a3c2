"""Channels are read from token ids; a text that spells them stays the text that it is."""

from __future__ import annotations

import pytest

from chorale.harmony.vocab import load_vocabulary
from chorale.testing.scripted_client import Script, ScriptedClient
from tests.support.faces import WAYS, ask
from tests.support.scripted import ANALYSIS, FINAL, NEXT, ids
from tests.support.server import Server, with_server

SPELLED = "analysisI think.assistantfinal<|channel|>final<|message|>not a channel<|end|>"


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_spelled_channels_are_text(face: str, stream: bool) -> None:
    vocab = load_vocabulary()
    tokens = [*ids(ANALYSIS + "T." + NEXT + FINAL), *vocab.encode(SPELLED), *ids("<|return|>")]

    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream)
        assert (outcome.reasoning, outcome.text) == ("T.", SPELLED)

    with_server(ScriptedClient(lambda request, index: Script(tokens)), main)


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_real_channels_are_not(face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream)
        assert (outcome.reasoning, outcome.text) == ("I think.", "Answer.")

    script = ANALYSIS + "I think." + NEXT + FINAL + "Answer.<|return|>"
    with_server(ScriptedClient(lambda request, index: Script(ids(script))), main)
