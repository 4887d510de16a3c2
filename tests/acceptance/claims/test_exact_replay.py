"""The prompt of turn two begins with prompt and output of turn one, token for token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.faces import WEATHER, ask, request_body, send
from tests.support.scripted import ANALYSIS, FINAL, NEXT, PREAMBLE, call, ids, in_rounds
from tests.support.server import Server, with_server

# As models write it, and as no renderer would: blanks in the JSON, headers in an order of their own.
WRITTEN = {
    "calls": ANALYSIS + "T." + NEXT + call("get_weather", '{ "city" :"Paris"}') + "<|call|>",
    "recipient first": ' to=functions.get_weather<|channel|>commentary json<|message|>{"city":"x"}<|call|>',
    "preamble": PREAMBLE
    + "Wait."
    + NEXT
    + call("get_weather", '{"city":"\\u0041"}', "analysis")
    + "<|call|>",
}


@pytest.mark.parametrize("script", WRITTEN.values(), ids=WRITTEN.keys())
@pytest.mark.parametrize("by_id", [True, False], ids=["previous_response_id", "items"])
@pytest.mark.parametrize("stream", [False, True])
def test_turn_two_continues_turn_one(script: str, by_id: bool, stream: bool) -> None:
    async def main(server: Server) -> None:
        first = await ask(server, "responses", stream, functions=[WEATHER])
        body = first.raw[-1]["response"] if stream else first.raw
        output = {"type": "function_call_output", "call_id": first.call_ids[0], "output": "21"}
        again = request_body("responses", functions=[WEATHER])
        if by_id:
            again |= {"input": [output], "previous_response_id": body["id"]}
        else:
            again["input"] = [*again["input"], *body["output"], output]
        answer: Any = (await send(server, "responses", again)).json()
        assert answer["status"] == "completed", answer
        before = server.prompt_ids(0) + ids(script)
        assert server.prompt_ids(1)[: len(before)] == before

    with_server(in_rounds(script, FINAL + "21.<|return|>"), main)
