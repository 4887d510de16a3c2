"""A background response is not resumed if its tool may have had side effects; searches have none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from chorale.tools.contract import Progress, ToolCall, ToolResult
from tests.support.scripted_tools import ScriptedService, tools_served
from tests.turns.tools.test_loop import CODE, PYTHON, SEARCH, WEB


@pytest.mark.parametrize(("call", "tool", "repeatable"), [(PYTHON, CODE, False), (SEARCH, WEB, True)])
async def test_repeatability_is_stored_in_advance(call: str, tool: dict[str, Any], repeatable: bool) -> None:
    running, kept = asyncio.Event(), list[bool]()

    async def hang(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        access = server.state.store._access
        row = await access.read(lambda db: db.execute("SELECT request IS NOT NULL FROM responses").fetchone())
        kept.append(bool(row[0]))
        running.set()
        await asyncio.Event().wait()
        yield ToolResult("python", "", True)

    async with tools_served(call, tools=ScriptedService(hang)) as server:
        try:
            status, made = await server.post(input="x", tools=[tool], background=True)
            assert status == 200, made
            await asyncio.wait_for(running.wait(), 10)
            assert kept == [repeatable]
            background = server.state.background
            await background.put_back()
            found = await server.state.store.get(made["id"], b"")
            assert found is not None
            assert (found.status == "queued") == repeatable
        finally:
            await server.state.background.close()
        found = await server.state.store.get(made["id"], b"")
        assert found is not None
        assert found.status == ("queued" if repeatable else "failed")
