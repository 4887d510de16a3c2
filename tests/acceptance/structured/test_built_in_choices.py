"""Forced and structured turns with tools of the server, on a real engine with a random checkpoint."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.grammar.schema_cases import BIAS, obj
from tests.support.grammar.structured import response_to
from tests.support.local_client import LocalClient
from tests.support.scripted_tools import ScriptedService
from tests.support.server import served

CODE = {"type": "code_interpreter", "container": {"type": "auto"}}
WEB = {"type": "web_search"}
MCP = {"type": "mcp", "server_label": "srv", "server_url": "http://127.0.0.1:1", "require_approval": "never"}
FORMAT = {
    "type": "json_schema",
    "name": "a",
    "schema": obj(city={"type": "string", "maxLength": 8}, n={"type": "integer", "minimum": 0, "maximum": 9}),
}
CHOICES: list[tuple[Any, set[str]]] = [
    ("required", {"web_search_call", "code_interpreter_call", "mcp_call"}),
    ({"type": "code_interpreter"}, {"code_interpreter_call"}),
    ({"type": "web_search_preview"}, {"web_search_call"}),
    ({"type": "mcp", "server_label": "srv"}, {"mcp_call"}),
    ({"type": "mcp", "server_label": "srv", "name": "echo"}, {"mcp_call"}),
    ({"type": "allowed_tools", "mode": "required", "tools": [CODE]}, {"code_interpreter_call"}),
]


async def respond(client: LocalClient, service: ScriptedService, **fields: Any) -> Any:
    options = {"names": ("demo",), "tool_service": service, "system_start_date": "2026-01-02"}
    async with served(client, **options) as server:
        return await response_to(server, **fields)


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: str(case[0])[:50])
def test_a_demanded_tool_runs_and_the_answer_is_valid(
    client: LocalClient, case: tuple[Any, set[str]]
) -> None:
    """The demand is met by the first round; the format holds in every one."""
    choice, allowed = case

    async def main() -> bool:
        service = ScriptedService()
        body = await respond(
            client,
            service,
            tools=[WEB, CODE, MCP],
            tool_choice=choice,
            text={"format": FORMAT},
            max_tool_calls=2,
            max_output_tokens=400,
            thinking_token_budget=16,
            seed=3,
            logit_bias=BIAS | {"200012": 12.0},  # or code, which is free text, would never end
        )
        calls = [item for item in body["output"] if item["type"].endswith("_call")]
        assert calls[0]["type"] in allowed
        whole = [call for call in calls if call["status"] == "completed"]
        assert 1 <= len(service.boxes[0].calls) == len(whole) <= 2
        if body["status"] == "completed":
            answer = json.loads(body["output"][-1]["content"][0]["text"])
            assert set(answer) == {"city", "n"}
            return True
        return False

    assert asyncio.run(asyncio.wait_for(main(), 60)), "the turn did not end in time"
