"""The turn ends at the first <|return|>; two final messages are two texts, neither lost."""

from __future__ import annotations

import pytest

from tests.support.faces import WAYS, Server, acceptance
from tests.support.scripted import ANALYSIS, FINAL, NEXT, playing


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_two_finals_are_two_texts(face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await server.ask(face, stream)
        assert (outcome.text, outcome.reasoning, outcome.finish) == ("One.\n\nTwo.", "A.\n\nB.", "stop")

    script = (
        ANALYSIS + "A." + NEXT + FINAL + "One." + NEXT + ANALYSIS + "B." + NEXT + FINAL + "Two.<|return|>"
    )
    acceptance(playing(script), main)


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_nothing_after_the_return(face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await server.ask(face, stream)
        assert outcome.text == "One."

    acceptance(playing(FINAL + "One.<|return|>" + "<|start|>assistant" + FINAL + "Again.<|return|>"), main)


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_what_is_asked_for_beyond_the_return_is_told(face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await server.ask(face, stream, ignore_eos=True)
        assert outcome.text == "One.\n\nAgain."

    acceptance(playing(FINAL + "One.<|return|>" + "<|start|>assistant" + FINAL + "Again.<|return|>"), main)
