"""kill -9 of the whole server during stored, background and conversation responses, again and again.

After every restart, the test checks what clients saw before: a body with a final status never changes, a
streamed event is in the stored stream, deleted objects stay deleted, a conversation contains every
acknowledged item in order, and nothing stays in progress.

The engine is the product's process around a fake device; server, store, supervisor and clients are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from chorale.jobs.background import STOPPED
from chorale.store.protocol import RESTARTED
from tests.serve.test_supervisor import Supervised, serve
from tests.support.ports import free_port

FINAL = ("completed", "incomplete", "failed", "cancelled")
ASK = {"input": "go on", "ignore_eos": True}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@dataclass
class History:
    """Everything that the server acknowledged to clients."""

    final: dict[str, dict[str, Any]] = field(default_factory=dict)  # bodies with a final status
    begun: set[str] = field(default_factory=set)  # background responses that were acknowledged
    events: dict[str, list[bytes]] = field(default_factory=dict)  # frames that were streamed
    deleted: set[str] = field(default_factory=set)
    items: dict[str, list[str]] = field(default_factory=dict)  # conversation id -> acknowledged items
    counts: Counter[str] = field(default_factory=Counter)
    patience: float = 0.0  # longest time in seconds after a restart until nothing is in progress

    def saw(self, body: dict[str, Any]) -> None:
        known = self.final.setdefault(body["id"], body)
        assert known == body, "a final body changed"
        self.counts[body["status"]] += 1


# --------------------------------------------------------------------------- the server


@contextlib.contextmanager
def started(store: str, port: int, **server: Any) -> Iterator[Supervised]:
    """Runs a server on ``port``; kills it and its child processes when the block ends."""
    options = {"port": port, "response_store": store, **server}
    with serve(behaviour={"step_seconds": 0.004}, server=options) as running:
        yield running
        running.process.kill()


def client(server: Supervised) -> httpx2.AsyncClient:
    server.until_ready()
    return httpx2.AsyncClient(base_url=server.url, timeout=20)


# --------------------------------------------------------------------------- the clients


async def ask(http: httpx2.AsyncClient, rng: random.Random, **fields: Any) -> httpx2.Response:
    return await http.post("/v1/responses", json={**ASK, "max_output_tokens": rng.randint(1, 60), **fields})


async def stored(http: httpx2.AsyncClient, seen: History, rng: random.Random) -> None:
    answer = await ask(http, rng)
    if answer.status_code != 200:
        return
    seen.saw(answer.json())
    if rng.random() < 0.2:
        response_id = answer.json()["id"]
        del seen.final[response_id]  # without an answer, it may or may not be deleted
        if (await http.delete(f"/v1/responses/{response_id}")).status_code == 200:
            seen.deleted.add(response_id)


async def background(http: httpx2.AsyncClient, seen: History, rng: random.Random) -> None:
    answer = await ask(http, rng, background=True)
    if answer.status_code != 200:
        return
    response_id = answer.json()["id"]
    seen.begun.add(response_id)
    if rng.random() < 0.3:
        cancelled = await http.post(f"/v1/responses/{response_id}/cancel")
        assert cancelled.status_code == 200
        seen.saw(cancelled.json())
        return
    while (body := (await http.get(f"/v1/responses/{response_id}")).json())["status"] not in FINAL:
        await asyncio.sleep(0.01)
    seen.saw(body)


async def streamed(http: httpx2.AsyncClient, seen: History, rng: random.Random) -> None:
    fields = {**ASK, "max_output_tokens": rng.randint(1, 60), "background": True, "stream": True}
    async with http.stream("POST", "/v1/responses", json=fields) as answer:
        if answer.status_code != 200:
            return
        rest, frames = b"", []
        async for piece in answer.aiter_bytes():
            *whole, rest = (rest + piece).split(b"\n\n")
            for frame in whole:
                if not frame.startswith(b":"):
                    frames.append(frame)
                    if len(frames) == 1:
                        response_id = read(frame)["response"]["id"]
                        seen.begun.add(response_id)
                        seen.events[response_id] = frames
        seen.saw(read(frames[-1])["response"])


async def conversing(http: httpx2.AsyncClient, seen: History, rng: random.Random) -> None:
    made = await http.post("/v1/conversations", json={})
    conversation_id = made.json()["id"]
    items = seen.items.setdefault(conversation_id, [])
    for _ in range(3):
        answer = await ask(http, rng, conversation=conversation_id)
        if answer.status_code != 200:
            return
        body = answer.json()
        seen.saw(body)
        items.extend(item["id"] for item in body["output"])


def read(frame: bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(frame.partition(b"\ndata: ")[2])
    return event


async def until_killed(
    use: Callable[[httpx2.AsyncClient, History, random.Random], Awaitable[None]],
    http: httpx2.AsyncClient,
    seen: History,
    rng: random.Random,
) -> None:
    with contextlib.suppress(httpx2.TransportError, httpx2.StreamError, json.JSONDecodeError):
        while True:
            await use(http, seen, rng)


# --------------------------------------------------------------------------- the check


async def check(http: httpx2.AsyncClient, seen: History, recent: set[str]) -> None:
    """Checks everything in ``recent``, and a sample of the rest."""
    rng = random.Random(len(seen.final))
    final = rng.sample(sorted(seen.final), min(60, len(seen.final)))
    for response_id in {*final, *(recent & seen.final.keys())}:
        answer = await http.get(f"/v1/responses/{response_id}")
        assert answer.json() == seen.final[response_id], response_id
    for response_id in rng.sample(sorted(seen.deleted), min(20, len(seen.deleted))):
        assert (await http.get(f"/v1/responses/{response_id}")).status_code == 404
    for response_id in recent - seen.deleted:
        await check_background(http, seen, response_id)
    for conversation_id in rng.sample(sorted(seen.items), min(20, len(seen.items))):
        await check_conversation(http, conversation_id, seen.items[conversation_id], seen.patience)


async def until_final(http: httpx2.AsyncClient, response_id: str, patience: float) -> dict[str, Any]:
    deadline = time.monotonic() + patience
    while True:
        body: dict[str, Any] = (await http.get(f"/v1/responses/{response_id}")).json()
        if body["status"] in FINAL:
            return body
        assert time.monotonic() < deadline, f"{response_id} is {body['status']} after the restart"
        await asyncio.sleep(0.1)


async def check_background(http: httpx2.AsyncClient, seen: History, response_id: str) -> None:
    """Checks that it has ended, and that its stored stream ends and contains every event a client saw."""
    body = await until_final(http, response_id, seen.patience)
    if body["status"] == "failed":
        assert body["error"] in (RESTARTED, {"code": "server_error", "message": STOPPED})
        seen.counts["cut off"] += 1
    seen.saw(body)
    content = (await http.get(f"/v1/responses/{response_id}?stream=true")).content
    frames = content.removesuffix(b"\n\n").split(b"\n\n")
    found = [read(frame) for frame in frames]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[-1]["response"] == body
    witnessed = seen.events.get(response_id, [])
    assert frames[: len(witnessed)] == witnessed, "an event that was streamed is not in the store"


async def check_conversation(
    http: httpx2.AsyncClient, conversation_id: str, acknowledged: list[str], patience: float
) -> None:
    url = f"/v1/conversations/{conversation_id}/items?order=asc&limit=100"
    page = (await http.get(url)).json()
    found = [item["id"] for item in page["data"]]
    assert not page["has_more"]
    assert [item_id for item_id in found if item_id in acknowledged] == acknowledged
    body = {**ASK, "conversation": conversation_id, "max_output_tokens": 1}
    async with asyncio.timeout(5 + patience):
        while (await http.post("/v1/responses", json=body)).status_code != 200:
            assert patience, "it is still locked"
            await asyncio.sleep(0.1)
    page = (await http.get(url)).json()
    acknowledged[:] = [item["id"] for item in page["data"]]  # from now on with the inputs


async def kill_again_and_again(folder: Path, num_kills: int, store: str | None = None) -> History:
    # The first to open a file knows at once that nobody else has it; on PostgreSQL a dead server is known by
    # its heartbeat. What goes on as queued then has to run.
    seen = History(patience=45.0 if store else 20.0)
    rng, port = random.Random(3), free_port()
    place = store or str(folder / "responses.sqlite3")
    recent: set[str] = set()
    for _ in range(num_kills):
        with started(place, port) as server:
            async with client(server) as http:
                await check(http, seen, recent)
                before = set(seen.begun)
                users = [
                    asyncio.create_task(until_killed(use, http, seen, random.Random(rng.random())))
                    for use in (stored, stored, background, background, streamed, streamed, conversing)
                ]
                await asyncio.sleep(rng.uniform(0.2, 1.0))
                server.process.kill()
                await asyncio.gather(*users)
                recent = seen.begun - before
    with started(place, port) as server:
        async with client(server) as http:
            await check(http, seen, recent)
            for response_id, body in seen.final.items():
                assert (await http.get(f"/v1/responses/{response_id}")).json() == body
    return seen


@pytest.mark.parametrize(
    "num_kills", [3, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_nothing_acknowledged_is_lost_and_nothing_hangs(tmp_path: Path, num_kills: int) -> None:
    started_at = time.monotonic()
    seen = asyncio.run(kill_again_and_again(tmp_path, num_kills))
    print(
        f"{num_kills} kills in {time.monotonic() - started_at:.0f} s: {len(seen.final)} final responses and"
        f" {sum(map(len, seen.events.values()))} streamed events read again, {len(seen.deleted)} deleted,"
        f" {sum(map(len, seen.items.values()))} items in {len(seen.items)} conversations,"
        f" {seen.counts['cut off']} background responses cut off, {num_resumed(tmp_path)} begun again,"
        " all ended"
    )
    assert num_resumed(tmp_path) > num_kills // 4
    assert len(seen.final) > 5 * num_kills
    assert seen.counts["cut off"] > num_kills // 4
    assert list(tmp_path.glob("*.corrupt-*")) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_acknowledged_is_lost_on_postgresql(tmp_path: Path) -> None:
    from tests.support.store.postgres import postgres

    with postgres() as url:
        seen = asyncio.run(kill_again_and_again(tmp_path, 5, store=url))
    assert len(seen.final) > 20
    assert seen.counts["cut off"] > 2


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_one_of_two_http_processes_is_killed(tmp_path: Path) -> None:
    """The other process starts its responses again, and continues its own."""
    store = str(tmp_path / "r.sqlite3")

    async def scenario(server: Supervised) -> None:
        async with client(server) as http:
            made = []
            while len(owners(store)) < 2:  # the kernel chooses which process a connection goes to
                async with httpx2.AsyncClient(base_url=http.base_url, timeout=20) as one:
                    answer = await one.post(
                        "/v1/responses", json={**ASK, "background": True, "max_output_tokens": 4000}
                    )
                    assert answer.status_code == 200, "all of them went to one process"
                    made.append(answer.json()["id"])
            workers = server.workers()
            assert len(workers) == 2
            os.kill(workers[0], signal.SIGKILL)
        ends: Counter[str] = Counter()
        async with httpx2.AsyncClient(
            base_url=server.url, timeout=20, transport=httpx2.AsyncHTTPTransport(retries=5)
        ) as http:
            for response_id in made:
                ends[(await until_final(http, response_id, 120))["status"]] += 1
        assert set(ends) == {"incomplete"}, ends

    with started(store, free_port(), api_server_count=2) as server:
        asyncio.run(scenario(server))


def num_resumed(folder: Path) -> int:
    with contextlib.closing(sqlite3.connect(folder / "responses.sqlite3")) as connection:
        query = "SELECT COUNT(*) FROM responses WHERE attempts > 0 AND status IN ('completed', 'incomplete')"
        return int(connection.execute(query).fetchone()[0])


def owners(store: str) -> set[str]:
    """Returns the processes that own running responses."""
    with contextlib.closing(sqlite3.connect(store)) as connection:
        rows = connection.execute("SELECT DISTINCT server_id FROM responses WHERE server_id IS NOT NULL")
        return {row[0] for row in rows}
