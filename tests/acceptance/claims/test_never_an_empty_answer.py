"""A turn that ends within its reasoning goes on to an answer; without budget it says so."""

from __future__ import annotations

import pytest

from tests.support.faces import WAYS, ask
from tests.support.scripted import ANALYSIS, in_rounds, playing
from tests.support.server import Server, with_server


@pytest.mark.parametrize("ending", ["<|return|>", "<|end|><|return|>", "<|call|>"])
@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_the_answer_is_forced(face: str, stream: bool, ending: str) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream)
        assert (outcome.reasoning, outcome.text, outcome.finish) == ("Only thoughts.", "Well.", "stop")
        assert server.prompt().endswith("<|start|>assistant<|channel|>final<|message|>")

    with_server(in_rounds(ANALYSIS + "Only thoughts." + ending, "Well.<|return|>"), main)


@pytest.mark.parametrize(("face", "stream"), WAYS)
def test_without_budget_the_end_is_length(face: str, stream: bool) -> None:
    async def main(server: Server) -> None:
        outcome = await ask(server, face, stream, max_tokens=5)
        assert (outcome.text, outcome.finish) == ("", "length")

    with_server(playing(ANALYSIS + "Only thoughts."), main)
