"""Events and fields have public names, one switch selects reasoning's name, and a failed stream ends."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import pytest
from openai.types.responses import ResponseStreamEvent

from chorale.errors import EngineDeadError
from tests.support.faces import request_body, send
from tests.support.scripted import ANALYSIS, FINAL, NEXT, playing
from tests.support.server import served
from tests.support.sse import frames

TURN = ANALYSIS + "Hm." + NEXT + FINAL + "Hi.<|return|>"
OF_THE_SDK = {
    get_args(event.model_fields["type"].annotation)[0] for event in get_args(get_args(ResponseStreamEvent)[0])
}
NAMES = {
    "openai": {"response.reasoning_text.delta", "response.reasoning_text.done"},
    "open-responses": {"response.reasoning.delta", "response.reasoning.done"},
    "summary": {"response.reasoning_summary_text.delta", "response.reasoning_summary_text.done"},
}


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize("by", ["flag", "header"])
async def test_a_dialect_selects_the_names_of_reasoning_events(dialect: str, by: str) -> None:
    async with served(playing(TURN), **{"responses_dialect": dialect} if by == "flag" else {}) as server:
        headers = {"x-responses-dialect": dialect} if by == "header" else {}
        path, body = "/v1/responses", {"input": "x", "background": True}
        made = (await server.http.post(path, json=body, headers=headers)).json()
        streamed = await server.http.post(path, json={"input": "x", "stream": True}, headers=headers)
        resumed = await server.http.get(f"{path}/{made['id']}?stream=true", headers=headers)
        kept = (await server.http.get(f"{path}/{made['id']}", headers=headers)).json()
        for events in (frames(streamed), frames(resumed)):
            kinds = {event["type"] for event in events}
            assert NAMES[dialect] <= kinds
            others = set().union(*(names for name, names in NAMES.items() if name != dialect))
            assert not kinds & others
            if dialect != "open-responses":
                assert kinds <= OF_THE_SDK
            where = "summary" if dialect == "summary" else "content"
            for body in (events[-1]["response"], kept):
                assert body["output"][0][where][0]["text"] == "Hm."


FIELDS = ("reasoning", "reasoning_content")
ANSWER = ANALYSIS + "Think." + NEXT + FINAL + "Hi.<|return|>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shown", ["both", *FIELDS])
async def test_answers_have_the_configured_reasoning_fields(stream: bool, shown: str) -> None:
    async with served(playing(ANSWER), reasoning_field=shown) as server:
        response = await send(server, "chat", request_body("chat", stream))
        if stream:
            deltas: list[dict[str, Any]] = [chunk["choices"][0]["delta"] for chunk in frames(response)]
            found = {name: "".join(delta.get(name) or "" for delta in deltas) for name in FIELDS}
        else:
            message = response.json()["choices"][0]["message"]
            found = {name: message.get(name, "") for name in FIELDS}
        assert found == {name: "Think." if shown in ("both", name) else "" for name in FIELDS}


async def test_the_stream_of_a_failed_response_ends_for_each_reader() -> None:
    """``tests/api/responses/background`` tests the ends of other responses."""
    client = playing(FINAL + "some text", delay=0.002, error=EngineDeadError("gone"))

    async with served(client) as server:
        made = await server.sdk.responses.create(input="x", background=True)

        async def follow(after: int) -> list[Any]:
            stream = await server.sdk.responses.retrieve(made.id, stream=True, starting_after=after)
            return [event async for event in stream]

        async with asyncio.timeout(10):
            live = await asyncio.gather(*(follow(after) for after in (0, 1, 3)))
            later = await follow(0)
        for events in (*live, later):
            assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
        assert live[0] == later
