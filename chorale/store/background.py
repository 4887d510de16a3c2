"""BackgroundResponses: background responses in the store, and all changes of their status.

Every change requires ``server_id`` in its WHERE clause. Ending a response sets it to NULL in the same
transaction, so a response ends once, whether by its owner, a cancellation or the expiry of its server.
"""

from __future__ import annotations

import json
import zlib
from functools import partial
from typing import Any

from chorale.store import repeats, servers
from chorale.store.access import Access
from chorale.store.batch_rows import release_batches
from chorale.store.conversation_rows import finish_lease, free_all
from chorale.store.database.sql import Database
from chorale.store.files import end_uploads
from chorale.store.protocol import RESPONSE_ID, Claimed, EventChunk, EventPage, Lease, Recover, StoredResponse
from chorale.store.responses import (
    COLUMNS,
    ROW_BYTES,
    find_response,
    insert_items,
    insert_response,
    item_row,
    load,
    row_size,
    to_json,
)
from chorale.store.servers import owns_more, register

_PAGE_CHUNKS = 64
_PAGE_BYTES = 2**16  # rendered by a reader at a time


class BackgroundResponses:
    """Responses that are stored before they end, each owned by one server process.

    The status moves forward: queued, in_progress, one final status. If its server dies, a response is
    ``queued`` again, without owner and events, if it may be resumed and has had fewer than ``MAX_ATTEMPTS``
    attempts; otherwise it fails. Methods that return whether they succeeded return False when this server no
    longer owns the response, because it was ended elsewhere or deleted.
    """

    def __init__(self, access: Access, recover: Recover) -> None:
        self._access = access
        self._recover = recover

    async def begin(self, response: StoredResponse, server_id: str, request: bytes | None = None) -> None:
        """Stores a queued response. ``request``: returned by ``claim`` on another server, if resumable."""
        await self._access.write(partial(self._begin, response, server_id, request))

    async def append(
        self, response_id: str, server_id: str, status: str, events: EventChunk, *, repeatable: bool = True
    ) -> bool:
        """Appends events. ``repeatable`` False: the response may not be resumed from now on."""
        return await self._access.write(partial(_append, response_id, server_id, status, events, repeatable))

    async def settle(self, response_id: str, owner: bytes) -> None:
        """Makes the response not resumable, before a reader gets its events."""
        await self._access.write(partial(_settle, response_id, owner))

    async def waiting(self) -> list[tuple[str, str]]:
        """Returns (id, model) of the responses that wait for a server."""
        return await self._access.read(repeats.waiting)

    async def claim(self, response_id: str, server_id: str) -> Claimed | None:
        """Takes a waiting response. Returns None if another server did, or if it was deleted."""

        def job(db: Database) -> Claimed | None:
            register(db, server_id)
            return repeats.claim(db, response_id, server_id)

        return await self._access.write(job)

    async def unclaim(self, response_id: str, server_id: str) -> None:
        """Returns a claimed response to the queue. The attempt does not count."""
        await self._access.write(lambda db: repeats.unclaim(db, response_id, server_id))

    async def put_back(self, server_id: str) -> list[str]:
        """Puts back the server's resumable responses at an orderly stop. Returns their ids."""
        return await self._access.write(lambda db: repeats.put_back(db, server_id, in_order=True))

    async def finish(
        self, response: StoredResponse, server_id: str, events: EventChunk, lease: Lease | None = None
    ) -> bool:
        return await self._access.write(partial(self._finish, response, server_id, events, lease))

    async def end(self, response_id: str, owner: bytes, status: str) -> StoredResponse | None:
        """Ends it from any server as ``cancelled`` or ``failed``. No effect if it has ended."""
        if not RESPONSE_ID.fullmatch(response_id):
            return None
        return await self._access.write(partial(self._end, response_id, owner, status))

    async def events(self, response_id: str, owner: bytes, start: int) -> EventPage | None:
        """Returns events from number ``start``, which must begin a chunk."""
        if not RESPONSE_ID.fullmatch(response_id):
            return None
        return await self._access.read(partial(self._events, response_id, owner, start))

    async def beat(self, server_id: str) -> set[str]:
        """Counts a heartbeat. Returns the ids of the server's live responses."""
        return await self._access.write(partial(_beat, server_id))

    async def servers(self) -> dict[str, int]:
        """Returns the number of heartbeats of every registered server."""
        return await self._access.read(servers.beats)

    async def expire(self, server_id: str, beat: int | None) -> list[str]:
        """Puts back or fails all responses of a dead server, unless its count of heartbeats is not ``beat``.

        Returns the ids of those that failed. A process that stops in order expires itself (``beat`` None).
        """

        def job(db: Database) -> list[str]:
            row = db.execute("SELECT beat FROM servers WHERE id = ?", (server_id,)).fetchone()
            return [] if row is None or beat not in (None, row[0]) else expire(db, server_id, self._recover)

        return await self._access.write(job)

    async def fail(self, server_id: str, response_ids: set[str]) -> None:
        """Fails responses that the server owns but does not work on."""

        def job(db: Database) -> None:
            for response_id in response_ids:
                row = db.execute(
                    f"SELECT {COLUMNS} FROM responses WHERE id = ? AND server_id = ?",
                    (response_id, server_id),
                ).fetchone()
                if row is not None:
                    _end_lost(db, row, "failed", self._recover)

        await self._access.write(job)

    # ------------------------------------------------------------------ on the threads

    def _begin(self, response: StoredResponse, server_id: str, request: bytes | None, db: Database) -> None:
        register(db, server_id)
        seq = insert_response(db, response, self._access.clock(), server_id)
        if request is not None:
            repeats.keep_request(db, seq, request)
        self._access.evict(db)

    def _finish(
        self, response: StoredResponse, server_id: str, events: EventChunk, lease: Lease | None, db: Database
    ) -> bool:
        seq = _owned(db, response.id, server_id)
        if seq is None:
            return False
        if lease is not None:
            finish_lease(db, lease, response, self._access.clock())
        _conclude(db, seq, response, events)
        return True

    def _end(self, response_id: str, owner: bytes, status: str, db: Database) -> StoredResponse | None:
        row = db.execute(
            f"SELECT {COLUMNS} FROM responses WHERE id = ? AND owner = ? AND server_id IS NOT NULL",
            (response_id, owner),
        ).fetchone()
        if row is not None:
            _end_lost(db, row, status, self._recover)
            repeats.free_conversations(db)
        return find_response(db, response_id, owner, self._access.oldest())

    def _events(self, response_id: str, owner: bytes, start: int, db: Database) -> EventPage | None:
        row = db.execute(
            "SELECT seq, server_id, request IS NOT NULL FROM responses"
            " WHERE id = ? AND owner = ? AND used >= ?",
            (response_id, owner, self._access.oldest()),
        ).fetchone()
        if row is None:
            return None
        seq, server_id, repeatable = row
        return EventPage(server_id is not None, bool(repeatable), tuple(_read_events(db, seq, start)))


# --------------------------------------------------------------------------- servers


def _beat(server_id: str, db: Database) -> set[str]:
    """Counts a heartbeat. Removes a server that owns nothing, so that idle servers write nothing."""
    owned = {
        row[0] for row in db.execute("SELECT id FROM responses WHERE server_id = ?", (server_id,)).fetchall()
    }
    if owned or owns_more(db, server_id):
        db.execute("UPDATE servers SET beat = beat + 1 WHERE id = ?", (server_id,))
    else:
        db.execute("DELETE FROM servers WHERE id = ?", (server_id,))
    return owned


def expire(db: Database, server_id: str, recover: Recover) -> list[str]:
    """Ends a dead server: its responses are put back for another server, or fail; its batches are put back.

    Returns the ids of the responses that failed.
    """
    db.execute("DELETE FROM servers WHERE id = ?", (server_id,))
    repeats.put_back(db, server_id, in_order=False)
    rows = db.execute(f"SELECT {COLUMNS} FROM responses WHERE server_id = ?", (server_id,)).fetchall()
    for row in rows:
        _end_lost(db, row, "failed", recover)
    free_all(db, server_id)
    release_batches(db, server_id)
    end_uploads(db, server_id)
    return [row[1] for row in rows]


# --------------------------------------------------------------------------- statements


def _owned(db: Database, response_id: str, server_id: str) -> int | None:
    row = db.execute(
        "SELECT seq FROM responses WHERE id = ? AND server_id = ?", (response_id, server_id)
    ).fetchone()
    return row[0] if row is not None else None


def _append(
    response_id: str, server_id: str, status: str, events: EventChunk, repeatable: bool, db: Database
) -> bool:
    row = db.execute(
        "SELECT seq, status, body FROM responses WHERE id = ? AND server_id = ?", (response_id, server_id)
    ).fetchone()
    if row is None:
        return False
    seq, before, body = row
    if before != status:
        fresh = to_json({**json.loads(body), "status": status})
        db.execute("UPDATE responses SET status = ?, body = ? WHERE seq = ?", (status, fresh, seq))
    _add_events(db, seq, events)
    if not repeatable:
        repeats.forget_request(db, seq)
    return True


def _settle(response_id: str, owner: bytes, db: Database) -> None:
    row = db.execute(
        "SELECT seq FROM responses WHERE id = ? AND owner = ? AND server_id IS NOT NULL", (response_id, owner)
    ).fetchone()
    if row is not None:
        repeats.forget_request(db, row[0])


def _add_events(db: Database, seq: int, events: EventChunk) -> None:
    if not events.num_events:
        return
    data = zlib.compress(events.data, 1)
    db.execute(
        "INSERT INTO events (response_seq, first, num_events, data) VALUES (?, ?, ?, ?)",
        (seq, events.first, events.num_events, data),
    )
    db.execute(
        "UPDATE responses SET num_bytes = num_bytes + ?, num_events = ? WHERE seq = ?",
        (len(data) + ROW_BYTES // 8, events.first + events.num_events, seq),
    )


def _conclude(db: Database, seq: int, response: StoredResponse, events: EventChunk) -> None:
    """Writes the final status, body, output and last events."""
    _add_events(db, seq, events)
    repeats.forget_request(db, seq)
    rows = list(map(item_row, response.output))
    insert_items(db, seq, rows, start=len(response.input), is_output=True)
    db.execute(
        "UPDATE responses SET status = ?, body = ?, server_id = NULL, num_bytes = num_bytes + ?"
        " WHERE seq = ?",
        (response.status, to_json(response.body), sum(map(row_size, rows)), seq),
    )


def _end_lost(db: Database, row: tuple[Any, ...], status: str, recover: Recover) -> None:
    """Ends a response whose owner cannot, with the output in its events. ``row``: its ``COLUMNS``."""
    response, chunks = load(db, row), _read_events(db, row[0], 0, whole=True)
    ended, data, num_events = recover(response, [chunk.data for chunk in chunks], status)
    first = chunks[-1].first + chunks[-1].num_events if chunks else 0
    _conclude(db, row[0], ended, EventChunk(first, num_events, data))


def count_live(db: Database) -> int:
    return int(db.execute("SELECT COUNT(*) FROM responses WHERE server_id IS NOT NULL").fetchone()[0])


def _read_events(db: Database, seq: int, start: int, *, whole: bool = False) -> list[EventChunk]:
    """Returns the chunks from event ``start``: one page, or all with ``whole``."""
    rows = db.execute(
        "SELECT first, num_events, data FROM events WHERE response_seq = ? AND first >= ? ORDER BY first"
        + ("" if whole else f" LIMIT {_PAGE_CHUNKS}"),
        (seq, start),
    )
    chunks: list[EventChunk] = []
    size = 0
    for first, num_events, packed in rows.fetchall():
        data = zlib.decompress(packed)
        chunks.append(EventChunk(first, num_events, data))
        size += len(data)
        if size > _PAGE_BYTES and not whole:
            break
    return chunks
