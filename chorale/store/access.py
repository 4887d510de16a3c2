"""Access: the writer and reader threads of one database, its bounds, and eviction.

``Rows`` is the base class of operations on the database. A method marked ``@reads`` or ``@writes`` gets the
connection as its first argument and runs on the reader's or writer's thread; callers await it.
"""

from __future__ import annotations

import functools
import heapq
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from chorale.config.engine import ServerConfig
from chorale.store.database.connection_thread import LOCK_SECONDS, ConnectionThread, Refusal
from chorale.store.database.sql import Database
from chorale.store.responses import totals

Result = TypeVar("Result")
Given = ParamSpec("Given")
OfRows = TypeVar("OfRows", bound="Rows")

EVICT_ROWS = 4  # most rows that one write evicts, so that no write is slow
_TIDY_ROWS = 32  # most rows per eviction in ``tidy``
_TIDY_SECONDS = 0.01  # longest time that ``tidy`` may delay a write


class Access:
    """The connections to a database. ``connect(True)`` opens the writer's, ``connect(False)`` the reader's.

    ``config``: its bounds are the store's. ``one``: reads use the writer's connection. ``begin``: the first
    operation of the writer.
    """

    def __init__(
        self,
        connect: Callable[[bool], Database],
        config: ServerConfig,
        *,
        clock: Callable[[], float] = time.time,
        idle_seconds: float = 60.0,
        one: bool = False,
        begin: Callable[[Database], None] | None = None,
        lock_seconds: float = LOCK_SECONDS,
    ) -> None:
        self.clock = clock
        self._config = config
        refusal = Refusal()
        self.writer = ConnectionThread(
            "responses-writer",
            lambda: connect(True),
            writes=True,
            first=begin,
            idle=self.tidy,
            idle_seconds=idle_seconds,
            lock_seconds=lock_seconds,
            refusal=refusal,
        )
        self.reader = self.writer
        if not one:
            self.reader = ConnectionThread(
                "responses-reader",
                lambda: connect(False),
                writes=False,
                lock_seconds=lock_seconds,
                refusal=refusal,
            )

    async def write(self, operation: Callable[[Database], Result]) -> Result:
        return await self.writer.run(operation)

    async def read(self, operation: Callable[[Database], Result]) -> Result:
        return await self.reader.run(operation)

    def close(self) -> None:
        """Finishes all queued operations, then closes the connections. Blocks."""
        self.reader.close()
        self.writer.close()

    # ------------------------------------------------------------------ called on the threads

    def oldest(self) -> float:
        """Returns the time of last use before which rows have expired and are hidden, evicted or not."""
        return self.clock() - self._config.response_store_ttl

    def tidy(self, db: Database) -> bool:
        """Evicts rows and releases free space while idle. Returns whether there is more to do."""
        end = time.monotonic() + _TIDY_SECONDS
        db.begin(writes=True, seconds=0.0)  # does not wait for locks: requests come first
        num_evicted = self.evict(db, _TIDY_ROWS)
        is_more = num_evicted == _TIDY_ROWS
        while is_more and time.monotonic() < end:
            is_more = self.evict(db, _TIDY_ROWS) == _TIDY_ROWS
        db.commit()
        return db.give_back(num_evicted) or is_more

    def evict(self, db: Database, max_rows: int = EVICT_ROWS) -> int:
        """Evicts up to ``max_rows`` rows in LRU order while a bound is exceeded. Returns their number.

        Running responses and leased conversations are never evicted.
        """
        num_responses, size, num_conversations = totals(db)
        num = num_responses + num_conversations
        most, most_bytes = self._config.response_store_max_items, self._config.response_store_max_bytes
        oldest = self.oldest()
        if num <= most and size <= most_bytes and not _any_older(db, oldest):
            return 0
        victims: dict[str, list[tuple[int]]] = {"responses": [], "conversations": []}
        for used, seq, num_bytes, table in heapq.merge(
            _unused(db, "responses", max_rows), _unused(db, "conversations", max_rows)
        ):
            within = used >= oldest and num <= most and size <= most_bytes
            if within or len(victims["responses"]) + len(victims["conversations"]) == max_rows:
                break
            victims[table].append((seq,))
            num, size = num - 1, size - num_bytes
        for table, rows in victims.items():
            if rows:
                db.executemany(f"DELETE FROM {table} WHERE seq = ?", rows)
        return sum(map(len, victims.values()))


class Rows:
    """Base class of operations on tables. Coroutines raise ``StoreError`` if the database fails."""

    def __init__(self, access: Access) -> None:
        self._access = access

    @property
    def now(self) -> float:
        return self._access.clock()


def reads(
    statements: Callable[Concatenate[OfRows, Database, Given], Result],
) -> Callable[Concatenate[OfRows, Given], Coroutine[Any, Any, Result]]:
    """Runs a method of ``Rows`` on the reader's thread, in one snapshot."""

    @functools.wraps(statements)
    async def run(self: OfRows, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return await self._access.read(lambda db: statements(self, db, *args, **kwargs))

    return run


def writes(
    statements: Callable[Concatenate[OfRows, Database, Given], Result],
) -> Callable[Concatenate[OfRows, Given], Coroutine[Any, Any, Result]]:
    """Runs a method of ``Rows`` on the writer's thread, in one transaction."""

    @functools.wraps(statements)
    async def run(self: OfRows, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return await self._access.write(lambda db: statements(self, db, *args, **kwargs))

    return run


def _any_older(db: Database, oldest: float) -> bool:
    """Returns whether any unused row has expired. Runs with every write; costs one index lookup per table."""
    row = db.execute(
        "SELECT EXISTS (SELECT 1 FROM responses WHERE used < ? AND server_id IS NULL)"
        " OR EXISTS (SELECT 1 FROM conversations WHERE used < ? AND server_id IS NULL)",
        (oldest, oldest),
    ).fetchone()
    return bool(row[0])


def _unused(db: Database, table: str, most: int) -> list[tuple[float, int, int, str]]:
    rows = db.execute(
        f"SELECT used, seq, num_bytes FROM {table} WHERE server_id IS NULL ORDER BY used, seq LIMIT ?",
        (most,),
    )
    return [(used, seq, num_bytes, table) for used, seq, num_bytes in rows.fetchall()]
