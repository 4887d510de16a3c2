"""Chat: built-in tools, as annotations and builtin_tool_calls, in bodies and streams."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.responses.items.test_built_in_events import CITED, CITED_TEXT, LINK
from tests.support.faces import pieces
from tests.support.responses import TOOL
from tests.support.scripted import events_of
from tests.support.scripted_tools import PAGE, ScriptedService, tools_served
from tests.support.server import Server
from tests.turns.tools.test_loop import CODE, ECHO, FINAL, MCP, PYTHON, SEARCH, THINK, WEB, failing

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
NESTED = {"type": "function", "function": {key: TOOL[key] for key in ("name", "parameters")}}


async def chat(server: Server, **fields: Any) -> Any:
    """Returns the first choice's message."""
    body = await server.respond(path=CHAT, messages=USER, **fields)
    return body["choices"][0]["message"]


async def test_calls_and_citations_are_in_the_message() -> None:
    """``tests/api/responses/test_built_in_properties.py`` compares the stream."""
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    async with tools_served(THINK + SEARCH, preamble + PYTHON, ECHO, CITED) as server:
        message = await chat(server, tools=[WEB, CODE, MCP])
    assert message["content"] == f"I look.\n\n{CITED_TEXT}"
    for entry in message["annotations"]:
        cited = entry["url_citation"]
        assert message["content"][cited["start_index"] : cited["end_index"]] == LINK
        assert (cited["url"], cited["title"]) == (PAGE.url, PAGE.title)
    assert len(message["annotations"]) == 2
    calls = message["builtin_tool_calls"]
    searched, computed, echoed = calls
    assert (searched["type"], searched["name"]) == ("web_search_call", "search")
    assert searched["action"]["sources"] == [{"type": "url", "url": PAGE.url}]
    assert (computed["arguments"], computed["output"]) == ("print(6 * 7)", "42\n")
    assert (echoed["server_label"], echoed["output"]) == ("srv", 'echo: {"text":"hi"}')
    assert message["reasoning"] == "I need a tool."
    assert {call["status"] for call in calls} == {"completed"}


async def test_output_streams_while_the_tool_runs() -> None:
    async with tools_served(PYTHON, FINAL) as server:
        answer = await server.http.post(CHAT, json={"messages": USER, "stream": True, "tools": [CODE]})
        told = pieces(events_of(answer), "builtin_tool_calls")
        outputs = [entry["output"] for entry in told if "output" in entry]
        assert outputs == ["4", "2\n", ""]


async def test_failed_calls_are_reported() -> None:
    tools = ScriptedService(failing("no network"))
    async with tools_served(PYTHON, ECHO, FINAL, tools=tools) as server:
        message = await chat(server, tools=[CODE, MCP])
        assert [call["status"] for call in message["builtin_tool_calls"]] == ["failed", "failed"]
        assert message["builtin_tool_calls"][1]["error"] == "no network"
        assert message["content"] == "It is 42."


async def test_a_function_call_may_follow_a_built_in_call() -> None:
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"a"}<|call|>'
    async with tools_served(PYTHON, call) as server:
        body = await server.respond(path=CHAT, messages=USER, tools=[CODE, NESTED])
        choice = body["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        assert choice["message"]["builtin_tool_calls"][0]["name"] == "python"
        # Clients send the message back unchanged.
        history = [
            *USER,
            choice["message"],
            {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "warm"},
        ]
        await server.respond(path=CHAT, messages=history, tools=[CODE, NESTED])


async def test_web_search_options_and_template_kwargs_enable_tools() -> None:
    async with tools_served(FINAL) as server:
        options = {
            "search_context_size": "high",
            "user_location": {"type": "approximate", "approximate": {"city": "Paris", "country": "FR"}},
        }
        await chat(server, web_search_options=options)
        wanted = server.tools.boxes[0].wanted.web_search
        assert (wanted.context_size, wanted.user_location) == ("high", "Paris, FR")
        assert "## browser" in server.prompt()
        await chat(server, chat_template_kwargs={"builtin_tools": ["browser", "python"]})
        assert "## browser" in server.prompt()
        assert "## python" in server.prompt()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**MCP, "require_approval": "always"}]}, "tools[0].require_approval"),
        ({"tools": [{**MCP, "server_label": "functions"}]}, "tools[0].server_label"),
        ({"tools": [{**MCP, "connector_id": "connector_gmail"}]}, "tools[0].connector_id"),
        ({"tools": [{**MCP, "headers": {"a": "b\nc"}}]}, "tools[0].headers"),
        ({"tools": [{**MCP, "allowed_tools": "echo"}]}, "tools[0].allowed_tools"),
        ({"tools": [{**MCP, "servr_url": "x"}]}, "tools[0].servr_url"),
        ({"tools": [{"type": "mcp", "server_label": "nobody"}]}, "tools[0]"),
        ({"tools": [WEB, WEB]}, "tools[1]"),
        ({"tools": [{**WEB, "search_context_size": "huge"}]}, "tools[0].search_context_size"),
        ({"tools": [{**WEB, "filters": {"allowed_domains": "x"}}]}, "tools[0].filters.allowed_domains"),
        (
            {"tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["f"]}}]},
            "tools[0].container.file_ids",
        ),
        (
            {"tools": [{"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "2g"}}]},
            "tools[0].container.memory_limit",
        ),
        ({"chat_template_kwargs": {"builtin_tools": ["container"]}}, "chat_template_kwargs.builtin_tools"),
        ({"tools": [CODE], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
)  # fmt: skip
async def test_errors_name_the_tool_field(fields: dict[str, Any], param: str) -> None:
    async with tools_served(FINAL) as server:
        status, body = await server.post(CHAT, messages=USER, **fields)
        assert (status, body["error"]["param"]) == (400, param)
        assert server.tools.boxes == []


CHAT_FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
ASKS = ((CHAT, {"messages": USER}, CHAT_FUNCTION), ("/v1/responses", {"input": "x"}, FUNCTION))


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "file_search", "vector_store_ids": ["v"]},
        {"type": "computer_use_preview"},
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "something_of_2030"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "image_generation"},
        {"type": "web_search"},
    ],
    ids=lambda tool: str(tool["type"]),
)
async def test_unavailable_tools_are_refused_alike_in_chat_and_responses(tool: dict[str, Any]) -> None:
    """A 400, except for tools that agents declare by default in addition to their functions."""
    async with tools_served(FINAL, tools=ScriptedService(available={})) as server:
        for path, given, function in ASKS:
            status, body = await server.post(path, tools=[tool], **given)
            error = body["error"]
            assert (status, error["code"], error["param"]) == (400, "tool_not_enabled", "tools[0]"), body
            status, body = await server.post(path, tools=[function, tool], **given)
            if tool["type"] in ("image_generation", "web_search"):
                assert status == 200, body
                assert "image" not in server.prompt()
                assert "## browser" not in server.prompt()
            else:
                assert (status, body["error"]["param"]) == (400, "tools[1]")
            status, body = await server.post(
                path, tools=[function, tool], tool_choice={"type": tool["type"]}, **given
            )
            assert status == 400


async def test_the_error_names_a_tool_server_that_does_not_answer() -> None:
    """It may offer the missing tool, which is unknown until it answers."""
    tools = ScriptedService(available={}, missing={"127.0.0.1:1": "could not be reached"})
    async with tools_served(FINAL, tools=tools) as server:
        for tool in (WEB, CODE, {"type": "mcp", "server_label": "theirs"}):
            status, body = await server.post("/v1/responses", input="x", tools=[tool])
            error = body["error"]
            assert (status, error["code"], error["param"]) == (400, "tool_not_enabled", "tools[0]")
            assert "--tool-server 127.0.0.1:1: could not be reached" in error["message"]
        status, body = await server.post(CHAT, messages=USER, tools=[WEB])
        assert status == 400
        assert "--tool-server 127.0.0.1:1: could not be reached" in body["error"]["message"]


async def test_mcp_servers_given_by_url_can_be_disabled() -> None:
    async with tools_served(FINAL, tools=ScriptedService(available={"srv": "x"})) as server:
        status, body = await server.post(input="x", tools=[MCP])
        error = body["error"]
        assert (status, error["param"], error["code"]) == (400, "tools[0].server_url", "tool_not_enabled")
        assert "--mcp-requests" in error["message"]
        await server.respond(input="x", tools=[{"type": "mcp", "server_label": "srv"}])
