"""Background responses of a dead server are resumed, or fail if a reader has seen their events."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from chorale.api.responses.background.follow import follow
from chorale.api.responses.background.resume import Resumer
from chorale.api.responses.request import packed_request
from chorale.api.responses.translate import RenderOptions
from chorale.config.engine import ServerConfig
from chorale.jobs.background import Background
from chorale.store.background import MAX_ATTEMPTS
from chorale.store.jobs import WAITING
from chorale.store.protocol import RESTARTED
from chorale.store.store import ResponseStore, SqliteStore, open_store
from chorale.tools.contract import Progress, ToolCall, ToolResult
from tests.api.responses.background.test_background import resume
from tests.store.test_store import kept
from tests.support.engine.scripted_client import Script, ids
from tests.support.responses import HELLO, fold_events, serve
from tests.support.scripted_tools import ScriptedService, tools_served
from tests.support.server import Server
from tests.turns.tools.test_loop import CODE, PYTHON, SEARCH, WEB

HANGS = Script(ids(HELLO)[:8], hang=True)
TEXTS = "abcdef"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a killed server's store, and the ids of its background responses, one per text."""
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.store.crashing_writer", folder / "r.sqlite3", *TEXTS],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -9
    return folder, done.stdout.split()


@pytest.fixture
def crashed(killed: tuple[Path, list[str]], tmp_path: Path) -> tuple[Path, list[str]]:
    """The path of a copy of the killed server's store, and the responses' ids."""
    return shutil.copytree(killed[0], tmp_path / "copy") / "r.sqlite3", killed[1]


@contextlib.asynccontextmanager
async def serving(
    store: ResponseStore, *texts: str | Script, watched: bool = True, **more: Any
) -> AsyncIterator[Server]:
    """Serve with a running background watch, as in production."""
    async with serve(*(texts or (HELLO,)), store=store, **more) as server:
        state = server.app.state
        state.background._beat_seconds = 0.05
        state.background.resumer = Resumer(state) if watched else None
        task = asyncio.create_task(state.background.run())
        try:
            yield server
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def rows(path: Path) -> Iterator[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        yield from database.execute("SELECT status, server_id, attempts, request IS NULL FROM responses")


async def test_responses_are_queued_after_a_crash_and_another_server_completes_them(
    crashed: tuple[Path, list[str]],
) -> None:
    path, made = crashed
    store = SqliteStore(str(path))
    assert list(rows(path)) == [("queued", WAITING, 1, 0)] * len(TEXTS)
    async with serving(store) as server:
        for response_id in made:
            body = await server.ended(response_id)
            assert (body["status"], body["output"][-1]["content"][0]["text"]) == ("completed", "Hi there!")
            events = await resume(server, response_id)
            kinds = [event["type"] for event in events]
            assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
            assert kinds.count("response.in_progress") == 1
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert fold_events(events) == body
            listed = await server.http.get(f"/v1/responses/{response_id}/input_items")
            assert len(listed.json()["data"]) == 1
        asked = [prompt.partition("<|start|>user<|message|>")[2][0] for prompt in server.prompts()]
        assert sorted(asked) == list(TEXTS)
    assert list(rows(path)) == [("completed", None, 1, 1)] * len(TEXTS)


async def test_a_response_fails_after_its_last_attempt(crashed: tuple[Path, list[str]]) -> None:
    """A response that crashes every server must not be resumed forever."""
    path, made = crashed

    for attempt in range(1, MAX_ATTEMPTS + 1):
        store = SqliteStore(str(path))
        for response_id in made:
            if (await kept(store, response_id)).status == "queued":
                assert await store.background.claim(response_id, f"wrk_{attempt}") is not None
        await store.close()  # as if the server had crashed
    store = SqliteStore(str(path))
    for response_id in made:
        found = await kept(store, response_id)
        assert (found.status, found.body["error"]) == ("failed", RESTARTED)
    assert await store.background.waiting() == []
    await store.close()


async def test_exactly_one_of_several_servers_resumes_a_response(crashed: tuple[Path, list[str]]) -> None:
    path, made = crashed
    stores = [SqliteStore(str(path)) for _ in range(3)]
    async with serving(stores[0]) as a, serving(stores[1]) as b, serving(stores[2]) as c:
        for response_id in made:
            assert (await a.ended(response_id))["status"] == "completed"
        assert sum(len(server.client.requests) for server in (a, b, c)) == len(made)


async def test_a_response_that_was_read_is_not_resumed(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "r.sqlite3"))
    async with serving(store, HANGS, watched=False) as server:
        made = await server.post(input="x", background=True)
        quiet = await server.post(input="x", background=True)
        # created, queued, in_progress, an item
        before = await asyncio.wait_for(_first_events(server, made[1]["id"], 4), 10)
        assert before[2] == "response.in_progress"
        await store.jobs.expire(server.app.state.background.leases.server_id, None)
        found = await kept(store, made[1]["id"])
        assert (found.status, found.body["error"]) == ("failed", RESTARTED)
        found = await kept(store, quiet[1]["id"])
        assert found.status == "queued"


async def _first_events(server: Server, response_id: str, number: int) -> list[str]:
    kinds: list[str] = []
    async with contextlib.aclosing(follow(server.app.state, response_id, b"", RenderOptions())) as stream:
        async for frames in stream:
            kinds += [kind.decode() for kind, _ in frames]
            if len(kinds) >= number:
                break
    return kinds


async def test_a_drain_leaves_responses_and_conversations_to_the_next_server(tmp_path: Path) -> None:
    path = str(tmp_path / "r.sqlite3")
    async with serving(SqliteStore(path), HANGS) as server:
        conversation = (await server.http.post("/v1/conversations", json={})).json()["id"]
        _, made = await server.post(input="go", background=True, conversation=conversation)
        while (await server.http.get(f"/v1/responses/{made['id']}")).json()["status"] == "queued":
            await asyncio.sleep(0.01)
        await server.app.state.background.put_back()
        body = (await server.http.get(f"/v1/responses/{made['id']}")).json()
        assert body["status"] == "queued"
    async with serving(SqliteStore(path)) as server:
        assert (await server.post(input="b", conversation=conversation))[0] == 400  # still leased
        assert (await server.ended(made["id"]))["status"] == "completed"
        items = (await server.http.get(f"/v1/conversations/{conversation}/items")).json()["data"]
        assert [item["type"] for item in items] == ["message", "reasoning", "message"]
        assert (await server.post(input="b", conversation=conversation))[0] == 200
    assert next(rows(Path(path)))[:3] == ("completed", None, 0)  # a drain counts no attempt


@pytest.mark.parametrize("way", ["cancel", "delete"])
async def test_ending_a_waiting_response_frees_its_conversation(tmp_path: Path, way: str) -> None:
    path = str(tmp_path / "r.sqlite3")
    async with serving(SqliteStore(path), HANGS, watched=False) as server:
        conversation = (await server.http.post("/v1/conversations", json={})).json()["id"]
        _, made = await server.post(input="go", background=True, conversation=conversation)
        await server.app.state.background.put_back()
    async with serving(SqliteStore(path), watched=False) as server:
        one = f"/v1/responses/{made['id']}"
        assert (await server.post(input="b", conversation=conversation))[0] == 400
        if way == "cancel":
            assert (await server.http.post(f"{one}/cancel")).json()["status"] == "cancelled"
        else:
            assert (await server.http.delete(one)).status_code == 200
        assert (await server.post(input="b", conversation=conversation))[0] == 200
        assert await server.store.background.waiting() == []


async def test_a_server_that_drains_or_has_another_model_resumes_nothing(
    crashed: tuple[Path, list[str]],
) -> None:
    path, made = crashed

    store = SqliteStore(str(path))
    async with serving(store, watched=False) as server:
        state = server.app.state
        assert sorted(await Resumer(state).find()) == sorted(made)
        state.lifecycle.draining = True
        assert await Resumer(state).find() == []
        state.lifecycle.draining = False
        object.__setattr__(state, "model_names", ("another",))
        assert await Resumer(state).find() == []


async def test_attempts_refused_by_a_full_engine_do_not_count(crashed: tuple[Path, list[str]]) -> None:
    path, _ = crashed

    store = SqliteStore(str(path))
    async with serving(store, max_in_flight=0):
        for _ in range(20):  # refused attempts do not count
            await asyncio.sleep(0.03)
            assert {(status, attempts) for status, _, attempts, _ in rows(path)} == {("queued", 1)}
    assert list(rows(path)) == [("queued", WAITING, 1, 0)] * len(TEXTS)


def test_requests_with_secrets_are_not_stored() -> None:
    server = {"type": "mcp", "server_label": "a", "server_url": "https://a.example"}
    assert packed_request({"input": "x", "tools": [server]}) is not None
    for name, value in (("authorization", "token"), ("headers", {"x-key": "secret"})):
        assert packed_request({"input": "x", "tools": [{**server, name: value}]}) is None


async def test_one_server_claims_a_waiting_response_on_postgresql(database: str) -> None:
    store = open_store(ServerConfig(response_store=database))
    async with serving(store, HANGS, watched=False) as server:
        _, made = await server.post(input="go", background=True)
        await store.jobs.expire(server.app.state.background.leases.server_id, None)
        assert [waiting for waiting, _ in await store.background.waiting()] == [made["id"]]
        claims = await asyncio.gather(*(store.background.claim(made["id"], f"wrk_{i}") for i in range(4)))
        assert sum(claimed is not None for claimed in claims) == 1


async def test_a_response_is_not_taken_twice_at_once() -> None:
    """``take`` may last longer than a heartbeat, because it encodes prompts and opens tools."""

    class Slow:
        room = 4
        num_taken = 0

        async def find(self) -> list[str]:
            return ["resp_1"]

        async def take(self, response_id: str, worker: str) -> None:
            self.num_taken += 1
            await asyncio.sleep(0.2)

    background, slow = Background(SqliteStore()), Slow()
    for _ in range(3):
        await background._resume_waiting(slow)
        await asyncio.sleep(0.01)
    assert slow.num_taken == 1
    await asyncio.gather(*background._resuming)


@pytest.mark.parametrize(("call", "tool", "status"), [(PYTHON, CODE, "failed"), (SEARCH, WEB, "queued")])
async def test_a_response_whose_tool_began_is_resumed_only_if_the_tool_has_no_side_effects(
    call: str, tool: dict[str, Any], status: str
) -> None:
    ended = asyncio.Event()

    async def hang(call: ToolCall) -> AsyncGenerator[Progress | ToolResult, None]:
        leases = server.state.background.leases
        await server.store.jobs.expire(leases.server_id, None)  # as if the server had died now
        ended.set()
        await asyncio.Event().wait()
        yield ToolResult("python", "", True, None)

    async with tools_served(call, tools=ScriptedService(hang)) as server:
        _, made = await server.post(input="x", tools=[tool], background=True)
        await asyncio.wait_for(ended.wait(), 10)
        assert (await kept(server.store, made["id"])).status == status
        await server.state.background.close()
