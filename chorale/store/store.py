"""The response store: SQLite (WAL, synchronous=FULL) in a file or in memory, or PostgreSQL at a URL.

One thread writes, another reads; the event loop only waits. The store is limited by count, bytes and age:
each write evicts a few rows beyond a limit, in LRU order, and an idle server evicts once a minute. Several
server processes may share one file, and several machines one PostgreSQL database.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from chorale.config.engine import ServerConfig
from chorale.store.access import Access, Rows, reads, writes
from chorale.store.background import (
    BackgroundResponses,
    count_live,
    fail_all,
    free_conversations,
    put_back,
)
from chorale.store.batch_rows import release_batches
from chorale.store.batches import Batches
from chorale.store.completions import Completions
from chorale.store.conversations import Conversations, finish_lease, free_all
from chorale.store.database.connection_thread import LOCK_SECONDS
from chorale.store.database.sql import Database
from chorale.store.database.sqlite import MEMORY, connect, is_read_only, prepare_file, share_file
from chorale.store.files import Files, end_uploads
from chorale.store.jobs import Jobs, all_servers
from chorale.store.protocol import (
    ITEM_ID,
    RESPONSE_ID,
    Lease,
    NoSpaceError,
    Recover,
    StoredItem,
    StoredResponse,
    StoreError,
    StoreStats,
    without_output,
)
from chorale.store.responses import (
    delete_response,
    find_item,
    find_response,
    find_tool_state,
    insert_response,
    not_found,
    read_chain,
    totals,
)

__all__ = [
    "ResponseStore", "SqliteStore", "StoreError", "StoredItem", "StoredResponse", "open_store",
]  # fmt: skip

logger = logging.getLogger(__name__)

_DEFAULTS = ServerConfig()
_POSTGRES = ("postgresql://", "postgres://")


def default_path() -> Path:
    """Returns ``$XDG_STATE_HOME/chorale/responses.sqlite3``, or the same under ``~/.local/state``."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "chorale" / "responses.sqlite3"


def open_store(config: ServerConfig, recover: Recover = without_output) -> ResponseStore:
    """Opens the configured store. Blocks while the file is checked.

    If the default location cannot be written, the store is in memory, with a warning. If a location named by
    the operator cannot be written, raises ``StoreError``. On a full disk, or if the named location is on a
    read-only disk, nothing is stored until a write succeeds, with a warning.
    """
    location = config.response_store
    if location is not None and is_postgres(location):
        from chorale.store.database.postgres import connect as connect_postgres

        return ResponseStore(Access(partial(connect_postgres, location), config), recover)
    if location is not None:
        return _warned(SqliteStore(location, config, recover))
    try:
        if is_read_only(default_path().parent):
            raise StoreError(f"{default_path().parent} is on a read-only disk")
        return _warned(SqliteStore(str(default_path()), config, recover))
    except (StoreError, OSError) as error:
        logger.warning("responses are kept in memory only: %s", error)
        return SqliteStore(MEMORY, config, recover)


def _warned(store: SqliteStore) -> SqliteStore:
    if store.fault is not None:
        logger.warning("responses are not stored until there is space: %s", store.fault)
    return store


def is_postgres(location: str) -> bool:
    """Returns whether ``--response-store`` names a PostgreSQL database rather than a file."""
    return location.startswith(_POSTGRES)


class ResponseStore(Rows):
    """The response store, on any ``Database``.

    Its coroutines never block the event loop, and raise ``StoreError`` if the database fails.
    """

    def __init__(self, access: Access, recover: Recover = without_output) -> None:
        super().__init__(access)
        self.background = BackgroundResponses(access, recover)
        self.conversations = Conversations(access)
        self.completions = Completions(access)
        self.files = Files(access)
        self.batches = Batches(access)
        self.jobs = Jobs(access, partial(_end, recover))

    @property
    def path(self) -> str | None:
        """Returns the path of the SQLite file, ``":memory:"``, or None for PostgreSQL."""
        return None

    @property
    def fault(self) -> str | None:
        """Returns the error of the last write, or None if it succeeded."""
        return self._access.writer.fault

    @writes
    def put(self, db: Database, response: StoredResponse, lease: Lease | None = None) -> None:
        """Stores a response durably. The id must be new.

        With ``lease``, input and output are appended to its conversation in the same transaction if the
        response is completed or incomplete, and the lease ends.
        """
        insert_response(db, response, self.now)
        if lease is not None:
            finish_lease(db, lease, response, self.now)
        self._access.evict(db)

    @reads
    def get(self, db: Database, response_id: str, owner: bytes) -> StoredResponse | None:
        if not RESPONSE_ID.fullmatch(response_id):
            return None
        return find_response(db, response_id, owner, self._access.oldest())

    @reads
    def chain(self, db: Database, response_id: str, owner: bytes) -> list[StoredItem]:
        """Returns the input and output items of the response and its predecessors, oldest first.

        Raises ``PreviousResponseNotFoundError`` if one of them is missing, ``RequestError`` if one has not
        ended, and ``ContextLengthError`` if the chain exceeds any context window.
        """
        if not RESPONSE_ID.fullmatch(response_id):
            raise not_found(response_id)
        return read_chain(db, response_id, owner, self._access.oldest())

    @reads
    def items(self, db: Database, item_ids: list[str], owner: bytes) -> dict[str, StoredItem]:
        """Returns the items that are stored, by id."""
        oldest = self._access.oldest()
        wanted = filter(ITEM_ID.fullmatch, dict.fromkeys(item_ids))
        found = {item_id: find_item(db, item_id, owner, oldest) for item_id in wanted}
        return {item_id: stored for item_id, stored in found.items() if stored is not None}

    @reads
    def tool_state(self, db: Database, item_id: str, owner: bytes) -> dict[str, Any] | None:
        """Returns the tools' final state of the newest response that has the item in its output."""
        if not ITEM_ID.fullmatch(item_id):
            return None
        return find_tool_state(db, item_id, owner, self._access.oldest())

    @writes
    def delete(self, db: Database, response_id: str, owner: bytes) -> bool:
        """Deletes a response. Returns whether it existed."""
        if not RESPONSE_ID.fullmatch(response_id):
            return False
        deleted = delete_response(db, response_id, owner, self._access.oldest())
        if deleted:
            free_conversations(db)
        return deleted

    @reads
    def stats(self, db: Database) -> StoreStats:
        return StoreStats(*totals(db), count_live(db))

    async def close(self) -> None:
        """Finishes queued operations and closes the store. Idempotent."""
        await asyncio.to_thread(self._access.close)


def _end(recover: Recover, db: Database, server_id: str) -> list[str]:
    """Ends the work of a dead server: its responses and batches are released for another server, or fail.

    Returns the ids of the responses that failed.
    """
    db.execute("DELETE FROM servers WHERE id = ?", (server_id,))
    put_back(db, server_id, died=True)
    failed = fail_all(db, server_id, recover)
    free_all(db, server_id)
    release_batches(db, server_id)
    end_uploads(db, server_id)
    return failed


class SqliteStore(ResponseStore):
    """A store in SQLite. ``path``: a file, or ``":memory:"``.

    A full or read-only disk is not an error: nothing is stored until a write succeeds; see ``fault``.
    ``recover`` ends the responses of dead servers; the default discards their output.
    """

    def __init__(
        self,
        path: str = MEMORY,
        config: ServerConfig = _DEFAULTS,
        recover: Recover = without_output,
        *,
        clock: Callable[[], float] = time.time,
        idle_seconds: float = 60.0,
        lock_seconds: float = LOCK_SECONDS,
    ) -> None:
        self._file = _File(path, recover)
        super().__init__(
            Access(
                self._file.connect,
                config,
                clock=clock,
                idle_seconds=idle_seconds,
                one=path == MEMORY,  # a database in memory has a single connection
                begin=self._file.expire,
                lock_seconds=lock_seconds,
            ),
            recover,
        )

    @property
    def path(self) -> str:
        return self._file.path

    async def close(self) -> None:
        await super().close()
        self._file.close()


class _File:
    """The file of a ``SqliteStore``, locked from its first opening to ``close``.

    If this process is the first to open the file, all earlier servers are dead and are expired.
    """

    def __init__(self, path: str, recover: Recover) -> None:
        self.path = path
        self._recover = recover
        self._lock_fd = -1
        self._dead: list[str] = []  # servers that used the file before this process

    def connect(self, first: bool) -> Database:
        if self.path == MEMORY or self._lock_fd >= 0:
            return connect(self.path, creating=first)
        if not first:
            raise NoSpaceError(f"the response store {self.path} is not open")
        lock_fd, alone = prepare_file(Path(self.path))
        with ExitStack() as undo:
            undo.callback(os.close, lock_fd)
            database = connect(self.path, creating=True)
            undo.callback(database.close)
            if alone:
                self._dead = all_servers(database)
                share_file(lock_fd)
            undo.pop_all()
        self._lock_fd = lock_fd
        return database

    def expire(self, db: Database) -> None:
        for server_id in self._dead:
            _end(self._recover, db, server_id)

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
