"""The work of a request, in SQLite instructions, does not grow with the number of stored rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from chorale.config.engine import ServerConfig
from chorale.store.database.sql import Page
from chorale.store.database.sqlite import SqliteDatabase
from chorale.store.files import StoredFile, new_file_id
from chorale.store.store import ResponseStore, SqliteStore
from tests.store.test_batches import batch_of, location, result, stored  # noqa: F401
from tests.store.test_store import make

QUOTA = ServerConfig(batch_max_files=10**6)
Work = Callable[[ResponseStore], Awaitable[Any]]


async def upload(store: ResponseStore) -> None:
    file = StoredFile(new_file_id(), b"me", 1.0, None, "user_data", "a", 10)
    await store.files.begin(file, "s1", QUOTA)
    await store.files.finish(file, "s1")


WORK: dict[str, Work] = {
    "upload": upload,
    "list": lambda store: store.files.page(b"me", Page(limit=5)),
    "list-no-match": lambda store: store.files.page(b"me", Page(), "vision"),
    "metrics": lambda store: store.batches.stats(),
    "sweep-files": lambda store: store.files.sweep(),
    "sweep-batches": lambda store: store.batches.sweep(1e9),
}


class Steps:
    """Counts the instructions and statements that a store executes."""

    def __init__(self, store: ResponseStore) -> None:
        self.num_steps = self.num_statements = 0
        self._store = store

    async def watch(self, on: bool = True) -> None:
        def operation(db: SqliteDatabase) -> None:
            db.set_progress_handler(self._step if on else None, 1)
            db.set_trace_callback(self._statement if on else None)

        await self._store._access.write(operation)  # type: ignore[arg-type]
        await self._store._access.read(operation)  # type: ignore[arg-type]

    def _step(self) -> None:
        self.num_steps += 1

    def _statement(self, text: str) -> None:
        self.num_statements += text.startswith(("SELECT", "WITH"))


async def grow(store: ResponseStore, num: int) -> None:
    """Adds ``num`` files of one owner, and a batch in progress with as many answered lines."""

    def fill(db: SqliteDatabase) -> None:
        rows = [(new_file_id(), b"me", 1.0, 1e12, "user_data", "a.txt", 1000) for _ in range(num)]
        db.executemany(
            "INSERT INTO files (id, owner, created, expires, purpose, filename, num_bytes, state)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 'ready')",
            rows,
        )

    await store._access.write(fill)  # type: ignore[arg-type]
    batch = await batch_of(store, b"other", num_lines=num)
    await store.batches.record(batch.id, "s1", [result(line) for line in range(1, num + 1)])


@pytest.mark.parametrize("name", WORK)
async def test_work_does_not_grow_with_files_and_answered_lines(name: str, tmp_path: Path) -> None:
    async def steps_at(num: int) -> int:
        store = SqliteStore(str(tmp_path / f"{num}.sqlite3"))
        await grow(store, num)
        await WORK[name](store)  # prepares the statements
        counted = Steps(store)
        await counted.watch()
        await WORK[name](store)
        await counted.watch(False)
        await store.close()
        return counted.num_steps

    few, many = await steps_at(20), await steps_at(2000)
    assert few > 10
    assert many < 1.5 * few


async def test_a_chain_is_read_by_one_query(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "r.sqlite3"))
    tip = None
    for _ in range(30):
        made = make(tip)
        await store.put(made)
        tip = made.id
    counted = Steps(store)
    await counted.watch()
    assert len(await store.chain(tip, b"")) == 60
    await counted.watch(False)
    assert counted.num_statements == 1
    await store.close()


async def test_totals_of_files_follow_every_change_of_a_row(location: str) -> None:  # noqa: F811
    async with stored(location) as store:

        async def totals() -> tuple[int, int]:
            stats = await store.batches.stats()
            return stats.num_files, stats.num_bytes

        files = [StoredFile(new_file_id(), owner, 1.0, None, "x", "a", 100) for owner in (b"a", b"a", b"b")]
        for file in files:
            await store.files.begin(file, "s1", QUOTA)
        assert await totals() == (3, 300)
        done = StoredFile(files[0].id, b"a", 1.0, None, "x", "a", 7)
        assert await store.files.finish(done, "s1")
        assert await totals() == (3, 207)
        await store.files.drop(files[1].id)
        assert await totals() == (2, 107)
        await store.files.delete(files[0].id, b"a")
        assert await totals() == (1, 100)
        await store.files.forget(await store.files.sweep())
        assert await totals() == (1, 100)
        await store.jobs.expire("s1", None)  # the server of the last upload is dead
        assert await totals() == (0, 0)
