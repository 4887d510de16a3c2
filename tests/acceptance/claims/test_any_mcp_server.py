"""Any MCP server works, by request or by --tool-server; the model reads its errors, no request fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from chorale.config.engine import ToolConfig
from chorale.testing.scripted_client import Script, ScriptedClient
from tests.support.ports import free_port
from tests.support.scripted import ids
from tests.support.server import VOCAB, served
from tests.support.sse import frames
from tests.support.tools.sdk_server import sdk_server

ROUNDS = (
    '<|channel|>commentary to=sample.add <|constrain|>json<|message|>{"a":19,"b":23}<|call|>',
    '<|channel|>commentary to=sample.fail <|constrain|>json<|message|>{"reason":"because"}<|call|>',
    "<|channel|>final<|message|>It is 42.<|return|>",
)
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def playing(*texts: str) -> ScriptedClient:
    rounds: Iterator[str] = iter(texts)
    return ScriptedClient(lambda request, index: Script(ids(next(rounds))))


def run(body: Any) -> None:
    asyncio.run(asyncio.wait_for(body, 60))


def check(prompts: list[str]) -> None:
    """Checks that the prompts contain the result of each call."""
    assert "<|start|>sample.add to=assistant<|channel|>commentary<|message|>42<|end|>" in prompts[1]
    failed = prompts[2].partition("<|start|>sample.fail to=assistant<|channel|>commentary<|message|>")[2]
    assert "fail" in failed.partition("<|end|>")[0]


@pytest.mark.parametrize("way", ["request", "flag"])
def test_results_and_errors_of_a_server_reach_the_model(way: str) -> None:
    async def body() -> None:
        async with sdk_server() as port:
            config = ToolConfig(allow_private_hosts=True)
            tool: dict[str, Any] = {"type": "mcp", "server_label": "sample", "require_approval": "never"}
            if way == "flag":
                config = ToolConfig(servers=(f"127.0.0.1:{port}",))
            else:
                tool["server_url"] = f"http://127.0.0.1:{port}/mcp"
            client = playing(*ROUNDS, *ROUNDS, *ROUNDS)
            async with served(client, tools=config) as server:
                http = server.http
                streamed = await http.post(RESPONSES, json={"input": "x", "tools": [tool], "stream": True})
                events = frames(streamed)
                whole = (await http.post(RESPONSES, json={"input": "x", "tools": [tool]})).json()
                messages = [{"role": "user", "content": "x"}]
                chat = (await http.post(CHAT, json={"messages": messages, "tools": [tool]})).json()
            types = [event["type"] for event in events]
            assert types.count("response.mcp_call.completed") == 1
            assert types.count("response.mcp_call.failed") == 1
            assert types[-1] == "response.completed"
            for answer in (events[-1]["response"], whole):
                listed, added, failed, message = answer["output"]
                assert [entry["name"] for entry in listed["tools"]] == ["add", "fail", "slow", "big"]
                assert (added["status"], added["output"], added["error"]) == ("completed", "42", None)
                assert (failed["status"], failed["output"]) == ("failed", None)
                assert "fail" in json.dumps(failed["error"])
                assert message["content"][0]["text"] == "It is 42."
            message = chat["choices"][0]["message"]
            assert message["content"] == "It is 42."
            assert [call["status"] for call in message["builtin_tool_calls"]] == ["completed", "failed"]
            prompts = [VOCAB.decode(request.prompt_token_ids) for request in client.requests]
            assert all("namespace sample {" in prompt for prompt in prompts)
            for start in (0, 3, 6):
                check(prompts[start : start + 3])

    run(body())


def test_a_turn_continues_without_an_unreachable_server() -> None:
    """The turn continues without it, and the item gives the reason."""

    async def body() -> None:
        url = f"http://127.0.0.1:{free_port()}/mcp"
        tool = {"type": "mcp", "server_label": "gone", "server_url": url, "require_approval": "never"}
        call = "<|channel|>commentary to=gone.any <|constrain|>json<|message|>{}<|call|>"
        client = playing(call, ROUNDS[2])
        tools = ToolConfig(allow_private_hosts=True)
        async with served(client, tools=tools) as server:
            answer = (await server.http.post(RESPONSES, json={"input": "x", "tools": [tool]})).json()
        assert answer["status"] == "completed"
        assert answer["output"][0]["type"] == "mcp_list_tools"
        assert answer["output"][0]["error"]
        assert answer["output"][-1]["content"][0]["text"] == "It is 42."
        assert "the tool gone.any does not exist" in VOCAB.decode(client.requests[1].prompt_token_ids)

    run(body())
