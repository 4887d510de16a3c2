"""Items of a response can be sent back by id or in any dumped form, and give the same tokens again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.faces import WEATHER, ask, request_body, send
from tests.support.scripted import ANALYSIS, FINAL, NEXT, PREAMBLE, call, ids, in_rounds
from tests.support.server import served

# Forms that models write and no renderer does: spaces in the JSON, headers in an unusual order.
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
async def test_turn_two_continues_turn_one(script: str, by_id: bool, stream: bool) -> None:
    async with served(in_rounds(script, FINAL + "21.<|return|>")) as server:
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


CALL = ANALYSIS + "T." + NEXT + PREAMBLE + "Wait." + NEXT + call("get_weather", "{}") + "<|call|>"
USER = {"role": "user", "content": "hi"}
OPTIONAL = ("id", "status", "annotations", "logprobs", "phase", "encrypted_content", "summary")


def bare(value: Any) -> Any:
    """Returns an item without its optional keys, and with an unknown one."""
    if isinstance(value, dict):
        return {"x_unknown": 1} | {k: bare(v) for k, v in value.items() if k not in OPTIONAL}
    return [bare(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("form", ["dumped", "without nulls", "whole objects", "bare"])
@pytest.mark.parametrize("store", [True, False])
async def test_items_are_accepted_in_every_dumped_form(form: str, store: bool) -> None:
    async with served(in_rounds(CALL, FINAL + "Done.<|return|>")) as server:
        body = request_body("responses", functions=[WEATHER])
        tools: Any = body["tools"]
        first = await server.sdk.responses.create(model="demo", input=[USER], tools=tools, store=store)  # type: ignore[list-item]
        given: list[Any] = {
            "dumped": [item.model_dump() for item in first.output],
            "without nulls": [item.model_dump(exclude_none=True) for item in first.output],
            "whole objects": list(first.output),
            "bare": [bare(item.model_dump()) for item in first.output],
        }[form]
        made: Any = first.output[-1]
        output = {"type": "function_call_output", "call_id": made.call_id, "output": "21"}
        again: Any = [USER, *given, output]
        second = await server.sdk.responses.create(model="demo", input=again, tools=tools, store=store)
        assert second.output_text == "Done."
        prompt = server.prompt()
        for part in ("analysis<|message|>T.<|end|>", "commentary<|message|>Wait.<|end|>", "21<|end|>"):
            assert prompt.count(part) == 1
