"""Every event of a stream has a public name; reasoning can have that of Open Responses."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.faces import WEATHER, request_body
from tests.support.scripted import ANALYSIS, NEXT, PREAMBLE, call, playing
from tests.support.server import Server, with_server
from tests.support.sse import frames

NOTE = {"type": "custom", "name": "note"}
SCRIPT = (
    ANALYSIS + "Think." + NEXT + PREAMBLE + "Wait." + NEXT
    + call("get_weather", "{}") + "<|call|><|start|>assistant" + call("note", '{"input":"x"}') + "<|call|>"
)  # fmt: skip


def public_names() -> set[str]:
    """Of OpenAI's SDK."""
    arms = typing.get_args(typing.get_args(ResponseStreamEvent)[0])
    return {typing.get_args(arm.model_fields["type"].annotation)[0] for arm in arms}


async def stream(server: Server, **headers: str) -> list[dict[str, Any]]:
    body = request_body("responses", True, functions=[WEATHER])
    body["tools"].append(NOTE)
    response = await server.http.post("/v1/responses", json=body, headers=headers)
    assert response.status_code == 200, response.text
    for line in response.text.splitlines():
        if line.startswith("event: "):
            assert f'"type":"{line[7:]}"' in response.text
    return frames(response)


def test_no_private_events() -> None:
    async def main(server: Server) -> None:
        events = await stream(server)
        names, adapter = public_names(), TypeAdapter(ResponseStreamEvent)
        for event in events:
            assert event["type"] in names
            adapter.validate_python(event)
        assert "response.reasoning_text.delta" in {event["type"] for event in events}
        assert "response.custom_tool_call_input.delta" in {event["type"] for event in events}

    with_server(playing(SCRIPT), main)


@pytest.mark.parametrize("way", ["flag", "header"])
def test_the_open_responses_names(way: str) -> None:
    async def main(server: Server) -> None:
        headers = {"x-responses-dialect": "open-responses"} if way == "header" else {}
        names = {event["type"] for event in await stream(server, **headers)}
        assert {"response.reasoning.delta", "response.reasoning.done"} <= names
        assert not any("reasoning_text" in name for name in names)

    config = {"responses_dialect": "open-responses"} if way == "flag" else {}
    with_server(playing(SCRIPT), main, **config)
