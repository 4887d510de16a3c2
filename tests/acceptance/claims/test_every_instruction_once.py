"""Every instruction is in the prompt once, in order; the identity can be replaced; none is inherited."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.faces import send
from tests.support.scripted import FINAL, playing
from tests.support.server import Server, with_server

DONE = FINAL + "ok<|return|>"
TEXTS = ["First rule.", "Second rule.", "Third rule.", "Question?", "Late rule.", "Again?"]


def in_order(prompt: str, texts: list[str]) -> None:
    assert [prompt.count(text) for text in texts] == [1] * len(texts)
    assert sorted(texts, key=prompt.index) == texts


@pytest.mark.parametrize("face", ["chat", "responses"])
def test_all_are_there_in_order(face: str) -> None:
    roles = ["system", "developer", "system", "user", "developer", "user"]
    messages: list[Any] = [{"role": r, "content": t} for r, t in zip(roles, TEXTS, strict=True)]

    async def main(server: Server) -> None:
        body = {"messages": messages} if face == "chat" else {"input": messages[1:], "instructions": TEXTS[0]}
        assert (await send(server, face, body)).status_code == 200
        in_order(server.prompt(), TEXTS)

    with_server(playing(DONE), main)


def test_anthropics_system_blocks_too() -> None:
    async def main(server: Server) -> None:
        system = [{"type": "text", "text": text} for text in TEXTS[:3]]
        messages = [{"role": "user", "content": TEXTS[3]}]
        body = {"model": "demo", "max_tokens": 9, "system": system, "messages": messages}
        assert (await send(server, "messages", body)).status_code == 200
        in_order(server.prompt(), TEXTS[:4])

    with_server(playing(DONE), main)


@pytest.mark.parametrize("face", ["chat", "responses"])
def test_the_identity_by_keyword(face: str) -> None:
    async def main(server: Server) -> None:
        said: Any = [{"role": "user", "content": "hi"}]
        body = {"messages": said} if face == "chat" else {"input": said}
        await send(server, face, {**body, "chat_template_kwargs": {"model_identity": "You are Ada."}})
        assert server.prompt().startswith("<|start|>system<|message|>You are Ada.\n")

    with_server(playing(DONE), main)


def test_instructions_of_a_follow_up_replace_the_old_ones() -> None:
    async def main(server: Server) -> None:
        first = (await send(server, "responses", {"input": "one", "instructions": "Old rule."})).json()
        body = {"input": "two", "instructions": "New rule.", "previous_response_id": first["id"]}
        await send(server, "responses", body)
        assert "Old rule." not in server.prompt()
        in_order(server.prompt(), ["New rule.", "one", "two"])

    with_server(playing(DONE), main)
