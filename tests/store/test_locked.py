"""The store while another process has its write lock: all operations share one deadline."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chorale.config.engine import ServerConfig
from chorale.store.access import Access
from chorale.store.store import ResponseStore, SqliteStore, StoreError
from tests.support.responses import serve
from tests.support.store.postgres import hung

HELLO = "<|channel|>final<|message|>Hello.<|return|>"
LOCK_SECONDS = 0.3
SLACK = 4.0  # seconds, for two busy cores; operations that wait one after another take longer


@contextlib.contextmanager
def write_lock(path: Path) -> Iterator[None]:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


def opened(path: Path) -> SqliteStore:
    return SqliteStore(str(path), lock_seconds=LOCK_SECONDS)


async def test_requests_that_wait_for_the_lock_share_one_deadline(tmp_path: Path) -> None:
    """Once, responses waited for the lock one after another, and the last of six for minutes."""
    path = tmp_path / "r.sqlite3"
    async with serve(HELLO, store=opened(path)) as server:
        kept = (await server.post(input="before"))[1]
        with write_lock(path):
            began = time.monotonic()
            async with asyncio.timeout(20):
                answers = await asyncio.gather(*(server.post(input="a") for _ in range(12)))
            assert LOCK_SECONDS - 0.1 <= time.monotonic() - began < LOCK_SECONDS + SLACK
            assert [(status, body["store"]) for status, body in answers] == [(200, False)] * 12
            assert all(body["status"] == "completed" for _, body in answers)
            read = await server.http.get(f"/v1/responses/{kept['id']}")  # reads do not wait
            assert read.status_code == 200
        assert (await server.post(input="after"))[1]["store"] is True


async def test_the_end_of_a_stream_waits_no_longer_than_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite3"
    async with serve(HELLO, store=opened(path)) as server:
        with write_lock(path):
            began = time.monotonic()
            events = await server.events(input="a")
            assert time.monotonic() - began < LOCK_SECONDS + SLACK
        assert events[-1]["type"] == "response.completed"
        assert events[-1]["response"]["store"] is False


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a", "background": True}),
        ("/v1/responses", {"input": "a", "background": True, "stream": True}),
        ("/v1/conversations", {}),
    ],
)
async def test_requests_that_need_the_store_get_503(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    file = tmp_path / "r.sqlite3"
    async with serve(HELLO, store=opened(file)) as server:
        with write_lock(file):
            began = time.monotonic()
            refused = await server.http.post(path, json=body)
            assert time.monotonic() - began < LOCK_SECONDS + SLACK
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["code"] == "store_unavailable"
        assert refused.json()["error"]["type"] == "service_unavailable"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await server.http.post(path, json=body)).status_code == 200


async def test_a_conversation_is_released_with_a_later_heartbeat(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite3"
    async with serve(HELLO, store=opened(path)) as server:
        made = await server.sdk.conversations.create()
        with write_lock(path):
            refused = await server.http.post("/v1/responses", json={"input": "a", "conversation": made.id})
            assert refused.status_code == 503  # the lease could not be taken
        lock = write_lock(path)
        background, store = server.app.state.background, server.store
        lease = await store.conversations.take(made.id, b"", background.leases.server_id)
        with lock:
            began = time.monotonic()
            await background.leases.release(lease)
            assert time.monotonic() - began < LOCK_SECONDS + SLACK
        assert (await server.post(input="a", conversation=made.id))[0] == 400  # still leased
        await background._look()
        assert (await server.post(input="a", conversation=made.id))[0] == 200


async def test_later_operations_have_a_later_deadline(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite3"

    store = opened(path)
    waited: list[float] = []

    async def write(delay: float) -> None:
        await asyncio.sleep(delay)
        began = time.monotonic()
        with pytest.raises(StoreError, match="locked by another process"):
            await store.conversations.create(b"", {}, [])
        waited.append(time.monotonic() - began)

    with write_lock(path):
        await asyncio.gather(*(write(i * LOCK_SECONDS / 4) for i in range(16)))
        assert store.fault is not None
    assert min(waited) >= LOCK_SECONDS - 0.1
    assert max(waited) < LOCK_SECONDS + SLACK
    await store.conversations.create(b"", {}, [])
    assert store.fault is None
    await store.close()


def postgres_store(database: str) -> ResponseStore:
    from chorale.store.database.postgres import connect

    return ResponseStore(Access(partial(connect, database), ServerConfig(), lock_seconds=LOCK_SECONDS))


async def test_a_hung_postgresql_delays_no_answer_beyond_the_deadline(database: str) -> None:
    async with serve(HELLO, store=postgres_store(database)) as server:
        kept = (await server.post(input="before"))[1]
        path = f"/v1/responses/{kept['id']}"
        with hung(database):
            for _ in range(2):  # the second time, the connections are lost
                began = time.monotonic()
                async with asyncio.timeout(30):
                    answers = await asyncio.gather(*(server.post(input="a") for _ in range(12)))
                assert [(status, body["store"]) for status, body in answers] == [(200, False)] * 12
                for asked in (
                    server.http.get(path),
                    server.http.post("/v1/responses", json={"input": "a", "background": True}),
                ):
                    assert (await asked).status_code == 503
                assert time.monotonic() - began < LOCK_SECONDS + 2 + SLACK  # 2: connect_timeout
        await recovered(server.store)
        assert (await server.http.get(path)).status_code == 200
        assert (await server.post(input="after"))[1]["store"] is True


async def recovered(store: ResponseStore) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(StoreError):
                await store.conversations.create(b"", {}, [])
                return
            await asyncio.sleep(0.05)


async def test_reads_and_writes_of_postgresql_recover_together(database: str) -> None:
    store = postgres_store(database)
    made = await store.conversations.create(b"", {}, [])
    with hung(database):
        for ask in (store.conversations.create(b"", {}, []), store.conversations.get(made.id, b"")):
            with pytest.raises(StoreError):
                await ask
        await asyncio.sleep(1.1)  # the next attempt to connect is the reader's
        with pytest.raises(StoreError):
            await store.conversations.get(made.id, b"")
    await recovered(store)
    assert (await store.conversations.get(made.id, b"")).id == made.id
    await store.close()


async def test_a_locked_postgresql_has_the_same_deadline(database: str) -> None:
    import psycopg

    from chorale.store.database.postgres import _LOCK

    store = postgres_store(database)
    made = await store.conversations.create(b"", {}, [])
    for statement in (
        f"SELECT pg_advisory_xact_lock({_LOCK})",
        "LOCK TABLE chorale.conversations IN SHARE MODE",
    ):
        with psycopg.connect(database) as other:
            other.execute(statement.encode())
            began = time.monotonic()
            results = await asyncio.gather(
                *(store.conversations.create(b"", {}, []) for _ in range(12)), return_exceptions=True
            )
            assert all(isinstance(result, StoreError) for result in results), results
            assert time.monotonic() - began < LOCK_SECONDS + SLACK
            assert (await store.conversations.get(made.id, b"")).id == made.id
        await store.conversations.create(b"", {}, [])
    await store.close()
