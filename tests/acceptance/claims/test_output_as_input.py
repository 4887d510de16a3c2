"""What a response gave may be sent back as input, however a client dumps it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.faces import WEATHER, request_body
from tests.support.scripted import ANALYSIS, FINAL, NEXT, PREAMBLE, call, in_rounds
from tests.support.server import Server, with_server

CALL = ANALYSIS + "T." + NEXT + PREAMBLE + "Wait." + NEXT + call("get_weather", "{}") + "<|call|>"
USER = {"role": "user", "content": "hi"}
OPTIONAL = ("id", "status", "annotations", "logprobs", "phase", "encrypted_content", "summary")


def bare(value: Any) -> Any:
    """Without every key that an item may lack, and with one that nobody knows."""
    if isinstance(value, dict):
        return {"x_unknown": 1} | {k: bare(v) for k, v in value.items() if k not in OPTIONAL}
    return [bare(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("form", ["dumped", "without nulls", "whole objects", "bare"])
@pytest.mark.parametrize("store", [True, False])
def test_every_way_of_dumping_is_read(form: str, store: bool) -> None:
    async def main(server: Server) -> None:
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

    with_server(in_rounds(CALL, FINAL + "Done.<|return|>"), main)
