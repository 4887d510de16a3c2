"""Forced and structured turns with built-in tools, on a real engine with a random checkpoint."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.support.faces import ask
from tests.support.grammar.schema_cases import BIAS, obj
from tests.support.grammar.structured import answering
from tests.support.local_client import LocalClient
from tests.support.scripted_tools import ScriptedService

CODE = {"type": "code_interpreter", "container": {"type": "auto"}}
WEB = {"type": "web_search"}
MCP = {"type": "mcp", "server_label": "srv", "server_url": "http://127.0.0.1:1", "require_approval": "never"}
SCHEMA = obj(city={"type": "string", "maxLength": 8}, n={"type": "integer", "minimum": 0, "maximum": 9})
NAMED = {"name": "a", "schema": SCHEMA}
FORMATS: dict[str, dict[str, Any]] = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    "responses": {"text": {"format": {"type": "json_schema", **NAMED}}},
}
ALLOWED = {"mode": "required", "tools": [CODE]}
# (API, options of the request, tool choice, kinds of call that satisfy it).
CHOICES: list[tuple[str, dict[str, Any], Any, set[str]]] = [
    ("responses", {}, "required", {"web_search_call", "code_interpreter_call", "mcp_call"}),
    ("responses", {}, {"type": "code_interpreter"}, {"code_interpreter_call"}),
    ("responses", {"stream": True}, {"type": "web_search_preview"}, {"web_search_call"}),
    ("responses", {"background": True}, {"type": "mcp", "server_label": "srv"}, {"mcp_call"}),
    ("responses", {}, {"type": "mcp", "server_label": "srv", "name": "echo"}, {"mcp_call"}),
    ("responses", {"stream": True}, {"type": "allowed_tools", **ALLOWED}, {"code_interpreter_call"}),
    ("chat", {}, {"type": "allowed_tools", "allowed_tools": ALLOWED}, {"code_interpreter_call"}),
    ("chat", {"stream": True}, {"type": "web_search"}, {"web_search_call"}),
]


async def test_a_demanded_tool_runs_and_the_answer_is_valid(client: LocalClient) -> None:
    """The first round makes the demanded call; every round follows the format."""
    service = ScriptedService()

    async with answering(client, tool_service=service) as server:

        async def one(face: str, way: dict[str, Any], choice: Any, kinds: set[str]) -> int:
            found = await ask(
                server,
                face,
                tools=[WEB, CODE, MCP],
                tool_choice=choice,
                max_tokens=400,
                thinking_token_budget=16,
                seed=3,
                logit_bias=BIAS | {"200012": 12.0},  # otherwise code, which is free text, would never end
                **FORMATS[face],
                **way,
                **({"max_tool_calls": 2} if face == "responses" else {}),
            )
            assert found.builtin[0][0] in kinds, (choice, found)
            if found.finish == "stop":
                assert set(json.loads(found.text)) == {"city", "n"}, (choice, found)
            return sum(status == "completed" for _, status in found.builtin)

        counts = await asyncio.gather(*(one(*case) for case in CHOICES))
        assert sum(counts) == sum(len(box.calls) for box in service.boxes)
        assert all(
            1 <= count <= (2 if case[0] == "responses" else count)
            for case, count in zip(CHOICES, counts, strict=True)
        )
