"""``continue_final_message`` in Responses: the model continues what a stopped response left open."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripted import FINAL, playing
from tests.support.server import served

ASKED = {"type": "message", "role": "user", "content": "Count"}
OPEN: dict[str, Any] = {
    "type": "message", "role": "assistant", "status": "incomplete",
    "content": [{"type": "output_text", "text": "one two", "annotations": []}],
}  # fmt: skip
THOUGHT = {
    "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I count"}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("items", "end"),
    [
        ([OPEN], "<|start|>assistant<|channel|>final<|message|>one two"),
        ([THOUGHT], "<|start|>assistant<|channel|>analysis<|message|>I count"),
        ([{**OPEN, "phase": "commentary"}], "<|start|>assistant<|channel|>commentary<|message|>one two"),
        (
            [THOUGHT, OPEN],
            "<|channel|>analysis<|message|>I count<|end|>"
            "<|start|>assistant<|channel|>final<|message|>one two",
        ),
    ],
)
async def test_the_prompt_ends_with_the_open_item(items: list[Any], end: str) -> None:
    async with served(playing(" three<|return|>")) as server:
        answer = await server.respond(input=[ASKED, *items], continue_final_message=True)
        assert server.prompt(0).endswith(end)  # after reasoning alone, the answer is forced in a second round
        item = answer["output"][0]
        part = item["content"][0]
        assert part["text"] == " three"
        assert item["type"] == items[-1]["type"]


async def test_a_background_response_continues() -> None:
    async with served(playing(" three<|return|>")) as server:
        events = await server.events(input=[ASKED, OPEN], continue_final_message=True, background=True)
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == " three"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [ASKED]}, "continue_final_message"),
        ({"input": [OPEN, ASKED]}, "continue_final_message"),
        ({"input": [ASKED, OPEN], "context_management": [{"type": "compaction"}]}, "continue_final_message"),
        ({"input": [ASKED, OPEN], "thinking_token_budget": 5}, "continue_final_message"),
        ({"input": [ASKED, OPEN], "text": {"format": {"type": "json_object"}}}, "continue_final_message"),
    ],
)
async def test_what_cannot_be_continued_is_refused(body: dict[str, Any], param: str) -> None:
    async with served(playing(FINAL)) as server:
        status, answer = await server.post(continue_final_message=True, **body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert server.client.requests == []


async def test_metrics_are_added_on_request() -> None:
    async with served(playing(FINAL + "x<|return|>")) as server:
        assert "metrics" not in await server.respond(input="a")
        assert "generation_time_ms" in (await server.respond(input="a", include=["metrics"]))["metrics"]
        events = await server.events(input="a", include=["metrics"], background=True)
        response = events[-1]["response"]
        assert "generation_time_ms" in response["metrics"]
        stored = await server.http.get(f"/v1/responses/{response['id']}")
        assert stored.json()["metrics"] == response["metrics"]
