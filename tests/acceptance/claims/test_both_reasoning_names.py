"""Reasoning goes out as reasoning and as reasoning_content, equal; both are read; a flag picks one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.faces import request_body, send
from tests.support.scripted import ANALYSIS, FINAL, NEXT, playing
from tests.support.server import Server, with_server
from tests.support.sse import frames

NAMES = ("reasoning", "reasoning_content")
ANSWER = ANALYSIS + "Think." + NEXT + FINAL + "Hi.<|return|>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shown", ["both", *NAMES])
def test_names_out(stream: bool, shown: str) -> None:
    async def main(server: Server) -> None:
        response = await send(server, "chat", request_body("chat", stream))
        if stream:
            deltas: list[dict[str, Any]] = [chunk["choices"][0]["delta"] for chunk in frames(response)]
            found = {name: "".join(delta.get(name) or "" for delta in deltas) for name in NAMES}
        else:
            message = response.json()["choices"][0]["message"]
            found = {name: message.get(name, "") for name in NAMES}
        assert found == {name: "Think." if shown in ("both", name) else "" for name in NAMES}

    with_server(playing(ANSWER), main, reasoning_field=shown)


@pytest.mark.parametrize("name", NAMES)
def test_names_in(name: str) -> None:
    async def main(server: Server) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, name: "My thought.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ]
        assert (await send(server, "chat", {"messages": messages})).status_code == 200
        assert server.prompt().count("<|channel|>analysis<|message|>My thought.<|end|>") == 1

    with_server(playing(ANSWER), main)
