"""POST /v1/chat/completions/batch answers each conversation as a chat of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chorale.engine.types import GenerateRequest
from tests.support.engine.scripted_client import Script, ScriptedClient
from tests.support.event_loop import until
from tests.support.scripted import ANALYSIS, FINAL, NEXT, ids, playing
from tests.support.server import VOCAB, served

PATH = "/v1/chat/completions/batch"


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def repeat(request: GenerateRequest, index: int) -> Script:
    """Answers with the last word of the conversation."""
    word = VOCAB.decode(request.prompt_token_ids).rpartition("<|message|>")[2].partition("<|end|>")[0]
    return Script(ids(f"{ANALYSIS}say{NEXT}{FINAL}{word}<|return|>"), num_cached_tokens=3)


async def test_each_conversation_has_a_choice_like_that_of_a_chat() -> None:
    async with served(ScriptedClient(repeat)) as server:
        fields: dict[str, Any] = {"return_token_ids": True, "temperature": 0.5, "seed": 4}
        texts = ["one", "two", "three"]
        chats = [(await server.chat(text, **fields)).json() for text in texts]
        alone = server.client.requests[:]
        body = (await server.http.post(PATH, json={"messages": [user(t) for t in texts], **fields})).json()
        assert body["object"] == "chat.completion"
        assert [choice["message"]["content"] for choice in body["choices"]] == texts
        assert body["choices"] == [{**chat["choices"][0], "index": i} for i, chat in enumerate(chats)]
        for name in ("prompt_tokens", "completion_tokens"):
            assert body["usage"][name] == sum(chat["usage"][name] for chat in chats)
        together = server.client.requests[3:]
        assert [r.prompt_token_ids for r in together] == [r.prompt_token_ids for r in alone]
        assert [r.sampling for r in together] == [r.sampling for r in alone]


async def test_all_conversations_are_admitted_or_none_and_end_with_the_client() -> None:
    client = ScriptedClient(lambda request, index: Script((5,), hang=True), max_in_flight=3)
    async with served(client) as server:
        conversations = [user("a")] * 3
        running = asyncio.ensure_future(server.http.post(PATH, json={"messages": conversations}))
        await until(lambda: client.num_in_flight == 3)
        assert (await server.http.post(PATH, json={"messages": conversations})).status_code == 429
        assert len(client.requests) == 3
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: not client.num_in_flight)
        assert not client.reserved


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": user("x")}, "messages[0]", "invalid_type"),
        ({"messages": [user("x")] * 257}, "messages", "invalid_value"),
        ({"messages": [user("x"), []]}, "messages[1]", "array_below_min_length"),
        ({"messages": [user("x"), [{"role": "odd"}]]}, "messages[1][0].role", "invalid_value"),
        ({"messages": [user("x"), user("x " * 140_000)]}, "messages[1]", "context_length_exceeded"),
        ({"n": 2}, "n", "unsupported_value"),
        ({"stream": True}, "stream", "unsupported_value"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_value"),
        ({"temperature": 9}, "temperature", "above_max_value"),
    ],
)
async def test_a_wrong_batch_is_refused(change: dict[str, Any], param: str, code: str) -> None:
    async with served(playing(f"{FINAL}x<|return|>")) as server:
        answer = await server.http.post(PATH, json={"messages": [user("x")], **change})
        assert answer.status_code == 400
        assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)
        assert not server.client.requests
