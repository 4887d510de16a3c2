"""One switch for what reasoning is called, by flag or header, and no event that nobody else has."""

from __future__ import annotations

from typing import get_args

import pytest
from openai.types.responses import ResponseStreamEvent

from tests.support.scripted import ANALYSIS, FINAL, NEXT, playing
from tests.support.server import Server, with_server
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
def test_the_switch(dialect: str, by: str) -> None:
    async def main(server: Server) -> None:
        headers = {"x-responses-dialect": dialect} if by == "header" else {}
        body = {"input": "x", "stream": True}
        events = frames(await server.http.post("/v1/responses", json=body, headers=headers))
        kinds = {event["type"] for event in events}
        assert NAMES[dialect] <= kinds
        others = set().union(*(names for name, names in NAMES.items() if name != dialect))
        assert not kinds & others
        if dialect != "open-responses":
            assert kinds <= OF_THE_SDK
        reasoning = events[-1]["response"]["output"][0]
        where = "summary" if dialect == "summary" else "content"
        assert reasoning[where][0]["text"] == "Hm."

    with_server(playing(TURN), main, **({"responses_dialect": dialect} if by == "flag" else {}))
