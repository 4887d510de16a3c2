"""Background responses in a store shared by several servers: transitions, heartbeats, expiry."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chorale.api.responses.event_log import LogEvent, TurnBegan, join, pack, read_chunk
from chorale.config.engine import ServerConfig
from chorale.jobs.background import Background
from chorale.store.protocol import RESTARTED, EventChunk, EventPage, StoredItem, StoredResponse
from chorale.store.store import ResponseStore, SqliteStore
from chorale.turns.events import ItemClosed, ItemDelta, ItemOpened
from tests.api.responses.background.test_background import HANGS, resume
from tests.store.test_locked import write_lock
from tests.store.test_store import kept, make, opened
from tests.support.engine.scripted_client import Script, ids
from tests.support.event_loop import until
from tests.support.responses import HELLO, fold_events, serve
from tests.support.sse import parse_sse

OPENED = ItemOpened(0, "msg_" + "1" * 32, "message", phase="final_answer")
HALF = (TurnBegan(), OPENED, ItemDelta(0, "Half a", (1, 2)))


@pytest.fixture(params=["file", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        url: str = request.getfixturevalue("database")
        return url
    return str(tmp_path / "responses.sqlite3")


def queued() -> StoredResponse:
    made = make()
    return replace(made, status="queued", body={**made.body, "status": "queued"}, output=())


def events(first: int, *made: LogEvent) -> EventChunk:
    packed = [data for event in made if (data := pack(event)) is not None]
    return EventChunk(first, len(packed), join(packed))


async def begun(store: ResponseStore, server_id: str = "srv_a") -> StoredResponse:
    response = queued()
    await store.background.begin(response, server_id)
    return response


async def page_of(store: ResponseStore, response_id: str, start: int = 0) -> EventPage:
    page = await store.background.events(response_id, b"", start)
    assert page is not None
    return page


async def said(store: ResponseStore, response: StoredResponse, server_id: str = "srv_a") -> bool:
    """Appends the events of half a message."""
    return await store.background.append(response.id, server_id, "in_progress", events(0, *HALF))


async def test_events_expire_with_their_response(tmp_path: Path) -> None:
    """They are hidden before the row is evicted, like the response itself."""
    now = [1000.0]
    file = str(tmp_path / "responses.sqlite3")
    store = SqliteStore(
        file, ServerConfig(response_store_ttl=50.0), clock=lambda: now[0], idle_seconds=3600.0
    )
    response = await begun(store)
    assert await said(store, response)
    assert await store.background.events(response.id, b"", 0) is not None
    now[0] += 51.0
    assert await store.background.events(response.id, b"", 0) is None
    await store.close()


async def test_a_background_response_goes_from_queued_to_completed(location: str) -> None:
    store = opened(location)
    response = await begun(store)
    found = await kept(store, response.id)
    assert (found.status, found.output) == ("queued", ())
    assert await said(store, response)
    found = await kept(store, response.id)
    assert found.status == found.body["status"] == "in_progress"
    page = await page_of(store, response.id, 0)
    assert page.live
    assert read_chunk(page.chunks[0].data) == list(HALF)
    size = (await store.stats()).num_bytes
    assert (await store.stats()).num_live == 1
    output = (StoredItem({"id": "msg_" + "2" * 32, "type": "message"}, (5, 6)),)
    done = replace(response, status="completed", body={"id": response.id}, output=output)
    last = events(3, ItemClosed(0))
    assert await store.background.finish(done, "srv_a", last)
    assert await store.get(response.id, b"") == done
    assert (await store.stats()).num_bytes > size
    assert (await store.stats()).num_live == 0
    assert not await said(store, response)
    assert not await store.background.finish(done, "srv_a", events(4))
    for start, number in ((0, 4), (3, 1), (4, 0), (99, 0)):
        page = await page_of(store, response.id, start)
        assert not page.live
        assert sum(chunk.num_events for chunk in page.chunks) == number
    assert await store.background.events(response.id, b"else", 0) is None
    assert await store.delete(response.id, b"")
    assert (await store.stats()).num_bytes == 0
    await store.close()


async def test_only_the_first_end_of_a_response_counts(location: str) -> None:
    ours, theirs = opened(location), opened(location)
    response = await begun(ours)
    await said(ours, response)
    ended_body = await theirs.background.end(response.id, b"", "cancelled")
    assert ended_body.status == ended_body.body["status"] == "cancelled"
    (item,) = ended_body.output
    assert item.item["status"] == "incomplete"
    assert item.item["content"][0]["text"] == "Half a"
    assert not await said(ours, response)
    assert not await ours.background.finish(replace(response, status="completed"), "srv_a", events(3))
    assert await theirs.background.end(response.id, b"", "cancelled") == ended_body
    assert await theirs.background.end(response.id, b"else", "cancelled") is None
    page = await page_of(ours, response.id, 3)
    closing = [event for chunk in page.chunks for event in read_chunk(chunk.data)]
    assert closing == [ItemClosed(0, "incomplete")]
    await ours.close()
    await theirs.close()


async def test_dead_servers_are_expired_and_live_ones_are_not(location: str) -> None:
    store = opened(location)
    dead, alive = await begun(store, "srv_dead"), await begun(store, "srv_alive")
    conversation = await store.conversations.create(b"", {}, ())
    await store.conversations.take(conversation.id, b"", "srv_dead")
    assert await store.jobs.servers() == {"srv_dead": 0, "srv_alive": 0}
    assert await store.jobs.beat("srv_alive") == {alive.id}
    assert await store.jobs.expire("srv_alive", 0) == []  # it has sent a heartbeat since
    assert await store.jobs.expire("srv_dead", 0) == [dead.id]
    found = await kept(store, dead.id)
    assert found.body["error"] == RESTARTED
    assert found.status == "failed"
    still = await kept(store, alive.id)
    assert still.status == "queued"
    await store.conversations.take(conversation.id, b"", "srv_alive")  # free again
    await store.close()


async def test_only_a_server_without_heartbeats_is_expired(location: str) -> None:
    stores = [opened(location), opened(location)]
    watches = [Background(store, patience=20) for store in stores]
    for watch, store in zip(watches, stores, strict=True):
        await store.background.begin(queued(), watch.leases.server_id)
    for _ in range(30):
        for watch in watches:
            await watch.leases.beat()
    assert set(await stores[0].jobs.servers()) == {watch.leases.server_id for watch in watches}
    for _ in range(21):
        await watches[0].leases.beat()
    assert set(await stores[0].jobs.servers()) == {watches[0].leases.server_id}
    for store in stores:
        await store.close()


async def test_the_first_process_to_open_a_file_fails_running_responses(tmp_path: Path) -> None:
    file = str(tmp_path / "r.sqlite3")
    store = SqliteStore(file)
    response = await begun(store)
    await said(store, response)
    second = SqliteStore(file)  # not the first process: nothing is failed
    found = await kept(second, response.id)
    assert found.status == "in_progress"
    await store.close()
    await second.close()
    third = SqliteStore(file)
    found = await kept(third, response.id)
    assert found.status == "failed"
    assert await third.jobs.servers() == {}
    await third.close()


async def test_a_running_response_is_not_evicted() -> None:
    store = SqliteStore(config=ServerConfig(response_store_max_items=3))
    running = await begun(store)
    for _ in range(8):
        await store.put(make())
    assert await store.get(running.id, b"") is not None
    assert (await store.stats()).num_responses == 3
    await store.close()


async def test_the_watch_continues_after_a_store_error(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite3"
    store = SqliteStore(str(path), lock_seconds=0.05)
    watch = Background(store, beat_seconds=0.02)
    stray = await begun(store, watch.leases.server_id)
    with write_lock(path):
        task = asyncio.create_task(watch.run())
        async with asyncio.timeout(20):
            while store.fault is None:  # a heartbeat was refused
                await asyncio.sleep(0.02)
    async with asyncio.timeout(20):
        while (found := await store.get(stray.id, b"")) is None or found.status != "failed":
            await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await store.close()


async def test_a_full_disk_delays_the_end_and_loses_nothing(tmp_path: Path) -> None:
    """Readers wait until the disk has space: events are sent only after they are stored."""
    store = SqliteStore(str(tmp_path / "r.sqlite3"))

    def fill(db: Any) -> None:
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count={pages}")

    def empty(db: Any) -> None:
        db.execute("PRAGMA max_page_count=1000000")

    long = "<|channel|>final<|message|>" + "".join(f"{i} words, " for i in range(2000)) + "<|return|>"
    async with serve(Script(ids(long), tokens_per_step=16, delay=0.001), store=store) as server:
        _, made = await server.post(input="hello", background=True)
        await store._access.write(fill)
        following = asyncio.create_task(resume(server, made["id"]))
        await asyncio.sleep(0.7)
        _, other = await server.post(input="x", max_output_tokens=1)
        assert other["store"] is False, "the disk is full"
        assert not following.done()
        await store._access.write(empty)
        body = await server.ended(made["id"])
        assert body["status"] == "completed"
        assert fold_events(await following) == body
        assert body["output"][0]["content"][0]["text"].endswith("1999 words, ")


# --------------------------------------------------------------------------- two servers


async def test_a_stream_is_followed_and_cancelled_through_another_server(location: str) -> None:
    async with serve(HANGS, store=opened(location)) as ours, serve(HELLO, store=opened(location)) as theirs:
        ours.app.state.background._beat_seconds = 0.05
        watch = asyncio.create_task(ours.app.state.background.run())
        made = await ours.sdk.responses.create(input="hello", background=True)
        following = asyncio.create_task(resume(theirs, made.id))
        while (await theirs.sdk.responses.retrieve(made.id)).status != "in_progress":
            await asyncio.sleep(0.01)
        cancelled = await theirs.sdk.responses.cancel(made.id)
        assert cancelled.status == "cancelled"
        assert fold_events(await following)["status"] == "cancelled"
        await until(lambda: ours.client.aborted, "the owner sees it at its next heartbeat", 5)
        assert (await ours.sdk.responses.retrieve(made.id)).status == "cancelled"
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def test_a_stream_is_read_live_through_another_server(location: str) -> None:
    async with (
        serve(Script(ids(HELLO), delay=0.02), store=opened(location)) as ours,
        serve(HELLO, store=opened(location)) as theirs,
    ):
        _, made = await ours.post(input="hello", background=True)
        answer, here = await asyncio.gather(
            theirs.http.get(f"/v1/responses/{made['id']}?stream=true"), resume(ours, made["id"])
        )
        there = parse_sse(answer.content.removeprefix(b": waiting\n\n"))
        assert there == here
        assert fold_events(there) == await theirs.ended(made["id"])
