"""Rows of batches and files, on SQLite and PostgreSQL: no record twice, one server per batch, no orphans."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chorale.config.engine import ServerConfig
from chorale.errors import QueueFullError
from chorale.ids import new_id
from chorale.store.batch_rows import BatchNotFoundError, Result, StoredBatch, Tokens
from chorale.store.files import FileInUseError, FileNotFoundFault, StoredFile, new_file_id
from chorale.store.store import ResponseStore, open_store

QUOTA = ServerConfig()
ME, OTHER = b"me", b"other"


@pytest.fixture(params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.sqlite3")
    return str(request.getfixturevalue("database"))


@contextlib.asynccontextmanager
async def stored(location: str) -> AsyncIterator[ResponseStore]:
    store = open_store(ServerConfig(response_store=location))
    try:
        yield store
    finally:
        await store.close()


async def file_of(store: ResponseStore, owner: bytes = ME, server: str = "s1") -> StoredFile:
    file = StoredFile(new_file_id(), owner, store.files.now, None, "batch", "in.jsonl", 10)
    await store.files.begin(file, server, QUOTA)
    assert await store.files.finish(file, server)
    return file


async def batch_of(store: ResponseStore, owner: bytes = ME, num_lines: int = 0) -> StoredBatch:
    """With ``num_lines``, the batch is claimed by s1 and validated."""
    file = await file_of(store, owner)
    now = store.batches.now
    body = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batch = StoredBatch(new_id("batch"), owner, "validating", now, now + 86400, file.id, body)
    await store.batches.create(batch, "demo", 100)
    if num_lines:
        assert await store.batches.claim("s1", "demo") is not None
        assert await store.batches.begin(batch.id, "s1", num_lines, "m")
    return batch


def result(line: int, completed: bool = True) -> Result:
    return Result(line, completed, b"record %d" % line, Tokens(3, 1, 2, 1))


async def test_a_record_exists_once_and_the_counts_agree(location: str) -> None:
    async with stored(location) as store:
        rows, batch, rng = store.batches, await batch_of(store, num_lines=60), random.Random(1)
        groups = [rng.choices(range(1, 61), k=9) for _ in range(20)]
        await asyncio.gather(
            *(rows.record(batch.id, "s1", [result(n, n % 3 != 0) for n in group]) for group in groups)
        )
        lines = {number for group in groups for number in group}
        assert await rows.answered(batch.id) == lines
        found = await rows.get(batch.id, ME)
        good = sorted(number for number in lines if number % 3)
        assert (found.num_completed, found.num_failed) == (len(good), len(lines) - len(good))
        assert found.tokens == Tokens(3 * len(lines), len(lines), 2 * len(lines), len(lines))
        assert await rows.results(batch.id, True, 0, 100) == [(n, b"record %d" % n) for n in good]
        assert [n for n, _ in await rows.results(batch.id, True, good[3], 2)] == good[4:6]


async def test_a_server_that_lost_a_batch_can_write_nothing(location: str) -> None:
    async with stored(location) as store:
        rows, batch = store.batches, await batch_of(store, num_lines=5)
        await rows.record(batch.id, "s1", [result(1)])
        output = StoredFile(new_file_id(), ME, store.files.now, None, "batch_output", "o", 1)
        await store.files.begin(output, "s1")
        await store.jobs.expire("s1", None)  # declared dead
        assert await rows.claim("s2", "other model") is None
        claimed = await rows.claim("s2", "demo")
        assert claimed.id == batch.id
        assert await rows.claim("s3", "demo") is None
        assert await rows.record(batch.id, "s1", [result(2)]) is None
        assert not await rows.begin(batch.id, "s1", 9, None)
        assert not await rows.finalize(batch.id, "s1")
        assert not await rows.end(batch.id, "s1", "completed", output=output)
        assert not await store.files.finish(output, "s1")
        assert await store.files.sweep() == [output.id]
        taken = await rows.owned(batch.id, "s2")
        assert (taken.num_lines, taken.num_completed, taken.attempts) == (5, 1, 1)
        await rows.record(batch.id, "s2", [result(2)])
        taken = await rows.owned(batch.id, "s2")
        assert taken.attempts == 0  # reset by the record


async def test_a_server_is_registered_while_it_owns_a_batch(location: str) -> None:
    async with stored(location) as store:
        batch = await batch_of(store, num_lines=5)
        await store.jobs.beat("s1")
        assert await store.jobs.servers() == {"s1": 1}
        assert await store.batches.end(batch.id, "s1", "completed")
        await store.jobs.beat("s1")
        assert await store.jobs.servers() == {}


async def test_owners_alternate_when_batches_are_claimed(location: str) -> None:
    async with stored(location) as store:
        first, second = await batch_of(store), await batch_of(store)
        third = await batch_of(store, OTHER)
        claims = [await store.batches.claim("s1", "demo") for _ in range(4)]
        assert [claim and claim.id for claim in claims] == [first.id, third.id, second.id, None]
        await store.batches.release("s1")
        assert await store.batches.any_waiting("demo")


async def test_the_end_is_one_transaction_and_old_rows_are_swept(location: str) -> None:
    async with stored(location) as store:
        rows, files = store.batches, store.files
        batch = await batch_of(store, num_lines=2)
        await rows.record(batch.id, "s1", [result(1), result(2, False)])
        with pytest.raises(FileInUseError):
            await files.delete(batch.input_file_id, ME)
        output = StoredFile(new_file_id(), ME, files.now, files.now + 50, "batch_output", "o", 9)
        await files.begin(output, "s1")
        with pytest.raises(FileNotFoundFault):  # not visible before the end
            await files.get(output.id, ME)
        assert await rows.end(batch.id, "s1", "completed", output=output)
        ended = await rows.get(batch.id, ME)
        assert (ended.status, ended.to_object()["output_file_id"]) == ("completed", output.id)
        assert (await files.get(output.id, ME)).num_bytes == 9
        assert await rows.sweep(1e9)
        assert await rows.answered(batch.id) == set()
        assert not await rows.sweep(1e9)
        assert await rows.sweep(-1.0)  # a negative ttl: every ended batch is old
        with pytest.raises(BatchNotFoundError):
            await rows.get(batch.id, ME)
        await files.delete(batch.input_file_id, ME)
        assert await files.sweep() == [batch.input_file_id]
        await files.forget([batch.input_file_id])
        assert await files.sweep() == []


async def test_a_quota_counts_uploads_in_progress(location: str) -> None:
    async with stored(location) as store:
        quota = ServerConfig(
            batch_max_file_bytes=60, batch_max_files=3, batch_max_bytes=100, batch_max_total_bytes=1000
        )

        async def begin(size: int) -> int:
            file = StoredFile(new_file_id(), ME, store.files.now, None, "", "", size)
            return await store.files.begin(file, "s1", quota)

        assert await begin(0) == 60  # of unknown size
        assert await begin(0) == 40  # the remaining quota
        with pytest.raises(Exception, match="--batch-max-bytes"):
            await begin(1)
        await store.jobs.expire("s1", None)
        assert [await begin(10) for _ in range(3)] == [10, 10, 10]
        with pytest.raises(QueueFullError, match="--batch-max-files"):
            await begin(1)


async def test_a_restart_puts_batches_of_dead_servers_back(tmp_path: Path) -> None:
    location = str(tmp_path / "store.sqlite3")
    async with stored(location) as store:
        await batch_of(store, num_lines=3)
    async with stored(location) as store:
        assert await store.batches.any_waiting("demo")
