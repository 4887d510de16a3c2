"""The grammar of a request is made once: with many tools it is most of the request's cost."""

from __future__ import annotations

from typing import Any

import pytest

from chorale.grammar.constraint import Constraint
from chorale.turns import rules
from tests.support.server import served


async def test_each_schema_of_a_request_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    make = rules.json_schema

    def counted(schema: Any, param: str) -> Constraint:
        seen.append(param)
        return make(schema, param)

    monkeypatch.setattr(rules, "json_schema", counted)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in "abc"
    ]

    async with served(None) as server:
        answer = await server.chat(tools=tools, tool_choice="required", max_tokens=1)
        assert answer.status_code == 200, answer.text
    assert len(seen) == len(tools)
