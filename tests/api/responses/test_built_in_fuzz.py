"""Requests with random built-in tools and items get an answer, or a 400 that names the invalid field."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses.tool import CodeInterpreter

from tests.api.chat.test_built_in_tools import CHAT, USER
from tests.support.scripted_tools import tools_served
from tests.support.server import Server
from tests.turns.tools.test_loop import FINAL, MCP

KEYS = st.sampled_from(["type", "a", "tool_names"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "x", "never", "auto", "a\nb"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner),
    max_leaves=4,
)
TOOL_KEYS = {
    "web_search": ["filters", "search_context_size", "user_location", "external_web_access",
                   "search_content_types"],
    "code_interpreter": ["container"],
    "mcp": ["server_label", "server_url", "headers", "authorization", "allowed_tools", "require_approval",
            "allowed_callers", "connector_id", "server_description"],
}  # fmt: skip
ITEM_KEYS = {
    "web_search_call": ["id", "action", "status", "results"],
    "code_interpreter_call": ["id", "code", "container_id", "outputs", "status"],
    "mcp_call": ["id", "server_label", "name", "arguments", "output", "error", "approval_request_id",
                 "status"],
    "mcp_list_tools": ["id", "server_label", "tools", "error"],
    "mcp_approval_request": ["id", "server_label", "name", "arguments"],
    "mcp_approval_response": ["approval_request_id", "approve", "reason"],
}  # fmt: skip
INNER = {
    "filters": st.fixed_dictionaries({}, optional={"allowed_domains": JSON}),
    "container": st.fixed_dictionaries(
        {"type": st.just("auto")},
        optional=dict.fromkeys(("memory_limit", "file_ids", "network_policy"), JSON),
    ),
    "action": st.fixed_dictionaries(
        {"type": st.sampled_from(["search", "open_page", "find_in_page"])},
        optional=dict.fromkeys(("query", "queries", "url", "pattern", "sources"), JSON),
    ),
    "outputs": st.lists(st.fixed_dictionaries({"type": st.just("logs"), "logs": JSON}), max_size=2),
}


def objects(keys: dict[str, list[str]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.sampled_from(sorted(keys)).flatmap(
        lambda kind: st.fixed_dictionaries(
            {"type": st.just(kind)}, optional={key: INNER.get(key, JSON) | JSON for key in keys[kind]}
        )
    )


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(objects(TOOL_KEYS), max_size=2),
    st.lists(objects(ITEM_KEYS), max_size=3),
    JSON | st.fixed_dictionaries({"type": st.sampled_from(["mcp", "web_search", "allowed_tools"])}),
    st.dictionaries(st.sampled_from(["search_context_size", "user_location", "type"]), JSON, max_size=2),
)
def test_no_request_causes_a_server_error(
    tools: list[Any], items: list[Any], choice: Any, options: dict[str, Any]
) -> None:
    async def main() -> None:
        async with tools_served(FINAL) as server:
            await check(server, "/v1/responses", {"input": [*USER, *items], "tools": [MCP]})
            await check(server, "/v1/responses", {"input": "x", "tools": tools})
            await check(server, "/v1/responses", {"input": "x", "tools": [MCP], "tool_choice": choice})
            await check(server, CHAT, {"messages": USER, "tools": tools or None})
            await check(server, CHAT, {"messages": USER, "web_search_options": options})

    asyncio.run(asyncio.wait_for(main(), 30))


async def check(server: Server, path: str, body: dict[str, Any]) -> None:
    status, answer = await server.post(path, **body)
    assert status in (200, 400, 404), (path, body, answer)
    if status == 400:
        assert answer["error"]["message"]
        assert answer["error"]["param"], (body, answer)


@pytest.mark.parametrize(
    "asked", [{}, {"container": None}, {"container": {"type": "auto", "memory_limit": "1g"}}]
)
async def test_a_code_interpreter_is_shown_with_a_container(asked: dict[str, Any]) -> None:
    """OpenAI's type requires a container, which requests to this server may omit."""
    async with tools_served(FINAL) as server:
        body = await server.respond(input="x", tools=[{"type": "code_interpreter", **asked}])
        (shown,) = body["tools"]
        assert shown["container"] == (asked.get("container") or {"type": "auto"})
        CodeInterpreter.model_validate(shown, strict=True)


async def test_secrets_are_neither_shown_nor_stored() -> None:
    async with tools_served(FINAL) as server:
        tool = {**MCP, "authorization": "sk-canary", "headers": {"X-Key": "sk-canary"}}
        body = await server.respond(input="x", tools=[tool])
        assert body["tools"][0]["headers"] == {"X-Key": "<redacted>"}
        stored = await server.http.get(f"/v1/responses/{body['id']}")
        assert "sk-canary" not in stored.text
        assert server.tools.boxes[0].wanted.mcp[0].authorization == "sk-canary"
