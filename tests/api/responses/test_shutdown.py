"""SIGTERM while background responses run: they may finish within the timeout, else they are queued again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from chorale.api.app import create_app
from chorale.store.store import SqliteStore
from tests.support import PATIENCE
from tests.support.engine.scripted_client import Script, ScriptedClient, ids
from tests.support.raw_http import call
from tests.support.responses import HELLO
from tests.support.server import listening, make_state


@pytest.mark.parametrize(
    ("script", "hurry", "status"),
    [
        (Script(ids(HELLO), delay=0.02), False, "completed"),
        (Script(ids(HELLO)[:8], hang=True), False, "queued"),
        (Script(ids(HELLO)[:8], hang=True), True, "queued"),
    ],
)
async def test_a_drain_finishes_or_requeues(tmp_path: Path, script: Script, hurry: bool, status: str) -> None:
    store = str(tmp_path / "responses.sqlite3")
    client = ScriptedClient(lambda request, index: script)
    timeout = 60.0 if status == "completed" or hurry else 0.3
    async with make_state(client, response_store=store, shutdown_timeout=timeout) as state:
        async with listening(create_app(state)) as server:
            made = await call(server.port, "POST", "/v1/responses", {"input": "x", "background": True})
            assert made.json["status"] == "queued"
            await asyncio.sleep(0.1)
            server.stop()
            if hurry:
                server.stop()
            await asyncio.wait_for(server.task, PATIENCE)
        reopened = SqliteStore(store)  # as another process would
        found = await reopened.get(made.json["id"], b"")
        assert found is not None
        assert found.status == status
        assert found.body["error"] is None
        assert (await reopened.background.waiting() != []) == (status == "queued")
        assert await reopened.jobs.servers() == {}
        await reopened.close()
