"""SqliteStore: responses in one SQLite file (WAL, synchronous=FULL), or in memory.

One thread writes, another reads; the event loop only waits. Bounded by count, bytes and age: what is over a
bound is evicted a little with each put, longest unused first, and an idle server tidies up once a minute.
Several server processes may share one file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from chorale.api.responses.rows import (
    MAX_CHAIN,
    all_items,
    delete_row,
    item_row,
    load,
    load_items,
    not_found,
    to_json,
    totals,
    touch_chain,
    unpack_tokens,
)
from chorale.api.responses.sqlite_file import MEMORY, connect, prepare_file
from chorale.api.responses.stored import (
    ITEM_ID,
    RESPONSE_ID,
    ResponseStore,
    StoredItem,
    StoredResponse,
    StoreError,
    StoreStats,
)
from chorale.api.responses.worker import SqliteWorker
from chorale.config import ServerConfig
from chorale.errors import ContextLengthError

__all__ = [
    "Bounds",
    "ResponseStore",
    "SqliteStore",
    "StoreError",
    "StoredItem",
    "StoredResponse",
    "open_store",
]

logger = logging.getLogger("chorale.api.responses")

MAX_CHAIN_BYTES = 64 * 2**20  # and its size: a hundred times what the window holds
_EVICT_ROWS = 32  # at most this many leave with one put, so that no put is slow
_VACUUM_PAGES = 256
_ROW_BYTES = 512  # what a row and its index entries take beside its content, roughly
_COLUMNS = "seq, id, owner, previous_id, created, status, body"


@dataclass(frozen=True, slots=True)
class Bounds:
    """``ttl``: seconds since a response was written or last continued."""

    max_responses: int = 100_000
    max_bytes: int = 10 * 2**30
    ttl: float = 30 * 86400.0


def default_path() -> Path:
    """``$XDG_STATE_HOME/chorale/responses.sqlite3``, or under ``~/.local/state``."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "chorale" / "responses.sqlite3"


def open_store(config: ServerConfig) -> ResponseStore:
    """The store that the configuration names. Blocks for the check of the file.

    A default place that cannot be written gives a store in memory and one warning; a place that the
    operator named raises ``StoreError``.
    """
    bounds = Bounds(
        config.response_store_max_items, config.response_store_max_bytes, config.response_store_ttl
    )
    if config.response_store is not None:
        return SqliteStore(config.response_store, bounds)
    try:
        return SqliteStore(str(default_path()), bounds)
    except (StoreError, OSError) as error:
        logger.warning("responses are kept in memory only: %s", error)
        return SqliteStore(MEMORY, bounds)


class SqliteStore:
    """Implements ``ResponseStore``. ``path`` is a file or ``":memory:"``."""

    def __init__(
        self,
        path: str = MEMORY,
        bounds: Bounds | None = None,
        *,
        clock: Callable[[], float] = time.time,
        idle_seconds: float = 60.0,
    ) -> None:
        self._bounds = bounds if bounds is not None else Bounds()
        self._clock = clock
        self._num_failed_puts = 0
        self._num_evicted = 0
        self._lock_fd = -1 if path == MEMORY else prepare_file(Path(path))
        self._writer = SqliteWorker(
            "responses-writer",
            partial(connect, path, migrating=True),
            writes=True,
            idle=self._tidy,
            idle_seconds=idle_seconds,
        )
        # A database in memory belongs to its one connection.
        self._reader = (
            self._writer
            if path == MEMORY
            else SqliteWorker("responses-reader", partial(connect, path, migrating=False), writes=False)
        )

    async def put(self, response: StoredResponse) -> None:
        try:
            await self._writer.run(partial(self._put, response))
        except StoreError:
            self._num_failed_puts += 1
            raise

    async def get(self, response_id: str, owner: bytes) -> StoredResponse | None:
        if not RESPONSE_ID.fullmatch(response_id):
            return None
        return await self._reader.run(partial(self._get, response_id, owner))

    async def chain(self, response_id: str, owner: bytes) -> list[StoredItem]:
        if not RESPONSE_ID.fullmatch(response_id):
            raise not_found(response_id)
        return await self._reader.run(partial(self._chain, response_id, owner))

    async def items(self, item_ids: list[str], owner: bytes) -> dict[str, StoredItem]:
        wanted = [item_id for item_id in dict.fromkeys(item_ids) if ITEM_ID.fullmatch(item_id)]
        return await self._reader.run(partial(self._items, wanted, owner)) if wanted else {}

    async def delete(self, response_id: str, owner: bytes) -> bool:
        if not RESPONSE_ID.fullmatch(response_id):
            return False
        return await self._writer.run(partial(delete_row, response_id, owner, self._oldest()))

    async def stats(self) -> StoreStats:
        num, size = await self._reader.run(totals)
        return StoreStats(num, size, self._num_failed_puts, self._num_evicted)

    async def close(self) -> None:
        await asyncio.to_thread(self._reader.close)
        await asyncio.to_thread(self._writer.close)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # ------------------------------------------------------------------ on the threads

    def _oldest(self) -> float:
        """Responses unused since before this are gone, evicted already or not."""
        return self._clock() - self._bounds.ttl

    def _put(self, response: StoredResponse, connection: sqlite3.Connection) -> None:
        now = self._clock()
        body = to_json(response.body)
        rows = [item_row(stored, output) for output, stored in all_items(response)]
        size = len(body) + _ROW_BYTES + sum(len(row[2]) + len(row[3]) + _ROW_BYTES for row in rows)
        cursor = connection.execute(
            "INSERT INTO responses (id, owner, previous_id, created, used, status, body, num_bytes)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                response.id,
                response.owner,
                response.previous_id,
                response.created,
                now,
                response.status,
                body,
                size,
            ),
        )
        seq = cursor.lastrowid
        connection.executemany(
            "INSERT INTO items (response_seq, position, is_output, id, item, token_ids)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            [(seq, position, *row) for position, row in enumerate(rows)],
        )
        if response.previous_id is not None:
            touch_chain(connection, response.previous_id, response.owner, now)
        self._evict(connection)

    def _evict(self, connection: sqlite3.Connection) -> int:
        """Remove up to ``_EVICT_ROWS`` responses that are over a bound; returns how many."""
        num, size = totals(connection)
        bounds, oldest = self._bounds, self._oldest()
        victims: list[tuple[int]] = []
        for seq, used, num_bytes in connection.execute(
            "SELECT seq, used, num_bytes FROM responses ORDER BY used, seq LIMIT ?", (_EVICT_ROWS,)
        ):
            if used >= oldest and num <= bounds.max_responses and size <= bounds.max_bytes:
                break
            victims.append((seq,))
            num, size = num - 1, size - num_bytes
        connection.executemany("DELETE FROM responses WHERE seq = ?", victims)
        self._num_evicted += len(victims)
        return len(victims)

    def _tidy(self, connection: sqlite3.Connection) -> None:
        """Idle work: evict what has aged, give pages back to the file system."""
        connection.execute("BEGIN IMMEDIATE")
        num_evicted = self._evict(connection)
        connection.execute("COMMIT")
        if num_evicted or connection.execute("PRAGMA freelist_count").fetchone()[0] > _VACUUM_PAGES:
            connection.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()

    def _get(self, response_id: str, owner: bytes, connection: sqlite3.Connection) -> StoredResponse | None:
        row = connection.execute(
            f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND owner = ? AND used >= ?",
            (response_id, owner, self._oldest()),
        ).fetchone()
        return load(connection, row) if row is not None else None

    def _chain(self, response_id: str, owner: bytes, connection: sqlite3.Connection) -> list[StoredItem]:
        links: list[int] = []
        size = 0
        current: str | None = response_id
        while current is not None:
            row = connection.execute(
                "SELECT seq, previous_id, num_bytes FROM responses WHERE id = ? AND owner = ? AND used >= ?",
                (current, owner, self._oldest()),
            ).fetchone()
            if row is None:
                raise not_found(current, wanted=response_id)
            links.append(row[0])
            size += row[2]
            if len(links) > MAX_CHAIN or size > MAX_CHAIN_BYTES:
                raise ContextLengthError(
                    "the stored conversation is too long to continue", param="previous_response_id"
                )
            current = row[1]
        return [stored for seq in reversed(links) for _, stored in load_items(connection, seq)]

    def _items(
        self, item_ids: list[str], owner: bytes, connection: sqlite3.Connection
    ) -> dict[str, StoredItem]:
        found: dict[str, StoredItem] = {}
        query = (
            "SELECT item, token_ids FROM items JOIN responses ON seq = response_seq"
            " WHERE items.id = ? AND owner = ? AND used >= ? ORDER BY length(token_ids) DESC LIMIT 1"
        )
        for item_id in item_ids:
            row = connection.execute(query, (item_id, owner, self._oldest())).fetchone()
            if row is not None:
                found[item_id] = StoredItem(json.loads(row[0]), unpack_tokens(row[1]))
        return found
