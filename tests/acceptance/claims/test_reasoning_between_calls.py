"""Thoughts since the last answer are rendered again, those before it are not; checked on the prompt."""

from __future__ import annotations

import pytest

from tests.support.faces import FACES, WEATHER, Call, ask
from tests.support.scripted import FINAL, playing
from tests.support.server import Server, with_server

DONE = FINAL + "ok<|return|>"


@pytest.mark.parametrize("face", FACES)
def test_a_tool_loop_keeps_its_thoughts(face: str) -> None:
    async def main(server: Server) -> None:
        history = ("one", Call(thought="First thought."), Call(thought="Second thought."))
        await ask(server, face, history=history, functions=[WEATHER])
        prompt = server.prompt()
        for thought in ("First thought.", "Second thought."):
            assert prompt.count(f"<|start|>assistant<|channel|>analysis<|message|>{thought}<|end|>") == 1
        first, second = prompt.index("First thought."), prompt.index("Second thought.")
        assert first < prompt.index("functions.get_weather to=assistant") < second

    with_server(playing(DONE), main)


@pytest.mark.parametrize("face", FACES)
def test_thoughts_before_an_answer_are_dropped(face: str) -> None:
    async def main(server: Server) -> None:
        history = (
            "one",
            Call(thought="Old thought."),
            ("assistant", "An answer.", "Older thought."),
            "two",
            Call(thought="New thought."),
        )
        await ask(server, face, history=history, functions=[WEATHER])
        prompt = server.prompt()
        assert "Old thought." not in prompt
        assert "Older thought." not in prompt
        assert "New thought." in prompt
        assert prompt.count("to=assistant<|channel|>commentary") == 2  # calls and results stay

    with_server(playing(DONE), main)
