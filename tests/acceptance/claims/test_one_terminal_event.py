"""The turn ends at the first <|return|>; two final messages are two texts, neither lost."""

from __future__ import annotations

import pytest

from tests.support.faces import WAYS, ask
from tests.support.scripted import ANALYSIS, FINAL, NEXT, playing
from tests.support.server import Server, with_server


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_two_finals_are_two_texts(face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream)
        assert (outcome.text, outcome.reasoning, outcome.finish) == ("One.\n\nTwo.", "A.\n\nB.", "stop")

    script = (
        ANALYSIS + "A." + NEXT + FINAL + "One." + NEXT + ANALYSIS + "B." + NEXT + FINAL + "Two.<|return|>"
    )
    with_server(playing(script), main)


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_nothing_after_the_return(face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream)
        assert outcome.text == "One."

    with_server(playing(FINAL + "One.<|return|>" + "<|start|>assistant" + FINAL + "Again.<|return|>"), main)


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_what_is_asked_for_beyond_the_return_is_told(face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream, ignore_eos=True)
        assert outcome.text == "One.\n\nAgain."

    with_server(playing(FINAL + "One.<|return|>" + "<|start|>assistant" + FINAL + "Again.<|return|>"), main)
