"""SqlLive: background responses in the store, from ``queued`` to their end. The one place for transitions.

Every change asks for ``worker`` in its WHERE: whoever ends a response sets it to NULL in the same
transaction, so a response ends once, whichever of its owner, a cancel or a burial comes first.
"""

from __future__ import annotations

import json
import zlib
from functools import partial
from typing import Any

from chorale.api.responses.replay import Replay, frame, read_frames
from chorale.store import repeats
from chorale.store.access import Access
from chorale.store.conversation_rows import finish_hold, free_all
from chorale.store.database import Database
from chorale.store.protocol import (
    RESPONSE_ID,
    Claimed,
    EventChunk,
    EventPage,
    Hold,
    StoredItem,
    StoredResponse,
)
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

_PAGE_CHUNKS = 64
_PAGE_BYTES = 2**20
RESTARTED = {
    "code": "server_error",
    "message": "the server that worked on this response ended before it was done",
}


class SqlLive:
    """Implements ``LiveResponses``."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def begin(
        self, response: StoredResponse, worker: str, events: EventChunk, request: bytes | None = None
    ) -> None:
        await self._access.write(partial(self._begin, response, worker, events, request))

    async def append(
        self, response_id: str, worker: str, status: str, events: EventChunk, *, repeatable: bool = True
    ) -> bool:
        return await self._access.write(partial(_append, response_id, worker, status, events, repeatable))

    async def settle(self, response_id: str, owner: bytes) -> None:
        await self._access.write(partial(_settle, response_id, owner))

    async def waiting(self) -> list[tuple[str, str]]:
        return await self._access.read(repeats.waiting)

    async def claim(self, response_id: str, worker: str) -> Claimed | None:
        def job(db: Database) -> Claimed | None:
            register(db, worker)
            return repeats.claim(db, response_id, worker)

        return await self._access.write(job)

    async def unclaim(self, response_id: str, worker: str) -> None:
        await self._access.write(lambda db: repeats.unclaim(db, response_id, worker))

    async def put_back(self, worker: str) -> list[str]:
        return await self._access.write(lambda db: repeats.put_back(db, worker, in_order=True))

    async def finish(
        self, response: StoredResponse, worker: str, events: EventChunk, hold: Hold | None = None
    ) -> bool:
        return await self._access.write(partial(self._finish, response, worker, events, hold))

    async def end(self, response_id: str, owner: bytes, status: str) -> StoredResponse | None:
        if not RESPONSE_ID.fullmatch(response_id):
            return None
        return await self._access.write(partial(self._end, response_id, owner, status))

    async def events(self, response_id: str, owner: bytes, after: int) -> EventPage | None:
        if not RESPONSE_ID.fullmatch(response_id):
            return None
        return await self._access.read(partial(self._events, response_id, owner, after))

    async def beat(self, worker: str) -> set[str]:
        return await self._access.write(partial(_beat, worker))

    async def workers(self) -> dict[str, int]:
        return await self._access.read(_workers)

    async def bury(self, worker: str, beat: int | None) -> list[str]:
        return await self._access.write(partial(_bury, worker, beat))

    async def fail(self, worker: str, response_ids: set[str]) -> None:
        await self._access.write(partial(_fail, worker, response_ids))

    # ------------------------------------------------------------------ on the threads

    def _begin(
        self,
        response: StoredResponse,
        worker: str,
        events: EventChunk,
        request: bytes | None,
        db: Database,
    ) -> None:
        register(db, worker)
        seq = insert_response(db, response, self._access.clock(), worker)
        _add_events(db, seq, events)
        if request is not None:
            repeats.keep_request(db, seq, request)
        self._access.evict(db)

    def _finish(
        self, response: StoredResponse, worker: str, events: EventChunk, hold: Hold | None, db: Database
    ) -> bool:
        seq = _owned(db, response.id, worker)
        if seq is None:
            return False
        if hold is not None:
            finish_hold(db, hold, response, self._access.clock())
        _conclude(db, seq, response, events)
        return True

    def _end(self, response_id: str, owner: bytes, status: str, db: Database) -> StoredResponse | None:
        row = db.execute(
            f"SELECT {COLUMNS} FROM responses WHERE id = ? AND owner = ? AND worker IS NOT NULL",
            (response_id, owner),
        ).fetchone()
        if row is not None:
            _cut(db, row[0], load(db, row), status)
            repeats.free_conversations(db)
        return find_response(db, response_id, owner, self._access.oldest())

    def _events(self, response_id: str, owner: bytes, after: int, db: Database) -> EventPage | None:
        row = db.execute(
            "SELECT seq, num_events, worker, request IS NOT NULL FROM responses"
            " WHERE id = ? AND owner = ? AND used >= ?",
            (response_id, owner, self._access.oldest()),
        ).fetchone()
        if row is None:
            return None
        seq, num_events, worker, repeatable = row
        chunks = tuple(_read_events(db, seq, after))
        return EventPage(worker is not None, bool(repeatable), num_events, chunks)


# --------------------------------------------------------------------------- workers


def register(db: Database, worker: str) -> None:
    """Make the worker known before it owns anything."""
    db.execute("INSERT INTO workers (id, beat) VALUES (?, 0) ON CONFLICT (id) DO NOTHING", (worker,))


def _beat(worker: str, db: Database) -> set[str]:
    """Who owns nothing any more is no worker: an idle server writes nothing."""
    owned = {row[0] for row in db.execute("SELECT id FROM responses WHERE worker = ?", (worker,)).fetchall()}
    held = db.execute("SELECT 1 FROM conversations WHERE worker = ? LIMIT 1", (worker,)).fetchone()
    if owned or held is not None:
        db.execute("UPDATE workers SET beat = beat + 1 WHERE id = ?", (worker,))
    else:
        db.execute("DELETE FROM workers WHERE id = ?", (worker,))
    return owned


def _workers(db: Database) -> dict[str, int]:
    return dict(db.execute("SELECT id, beat FROM workers").fetchall())


def all_workers(db: Database) -> list[str]:
    """Every worker that is known, or owns something."""
    rows = db.execute(
        "SELECT id FROM workers UNION SELECT worker FROM responses WHERE worker IS NOT NULL"
        " UNION SELECT worker FROM conversations WHERE worker IS NOT NULL"
    )
    return [row[0] for row in rows.fetchall() if row[0] != repeats.WAITING]


def bury(db: Database, worker: str) -> list[str]:
    """A worker is dead: what it owned waits for another one, or has failed. The ids of those that failed."""
    db.execute("DELETE FROM workers WHERE id = ?", (worker,))
    repeats.put_back(db, worker, in_order=False)
    return fail_owned(db, worker)


def _bury(worker: str, beat: int | None, db: Database) -> list[str]:
    row = db.execute("SELECT beat FROM workers WHERE id = ?", (worker,)).fetchone()
    if row is None or beat not in (None, row[0]):
        return []
    return bury(db, worker)


def _fail(worker: str, response_ids: set[str], db: Database) -> None:
    for response_id in response_ids:
        row = db.execute(
            f"SELECT {COLUMNS} FROM responses WHERE id = ? AND worker = ?", (response_id, worker)
        ).fetchone()
        if row is not None:
            _cut(db, row[0], load(db, row), "failed")


def fail_owned(db: Database, worker: str) -> list[str]:
    """Fail every live response of a worker; its conversations are free again."""
    rows = db.execute(f"SELECT {COLUMNS} FROM responses WHERE worker = ?", (worker,)).fetchall()
    for row in rows:
        _cut(db, row[0], load(db, row), "failed")
    free_all(db, worker)
    return [row[1] for row in rows]


# --------------------------------------------------------------------------- statements


def _owned(db: Database, response_id: str, worker: str) -> int | None:
    row = db.execute(
        "SELECT seq FROM responses WHERE id = ? AND worker = ?", (response_id, worker)
    ).fetchone()
    return row[0] if row is not None else None


def _append(
    response_id: str, worker: str, status: str, events: EventChunk, repeatable: bool, db: Database
) -> bool:
    row = db.execute(
        "SELECT seq, status, body FROM responses WHERE id = ? AND worker = ?", (response_id, worker)
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
        "SELECT seq FROM responses WHERE id = ? AND owner = ? AND worker IS NOT NULL", (response_id, owner)
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
    """The final status, the body, the output and the last events, in this one transaction."""
    _add_events(db, seq, events)
    repeats.forget_request(db, seq)
    rows = list(map(item_row, response.output))
    insert_items(db, seq, rows, start=len(response.input), is_output=True)
    db.execute(
        "UPDATE responses SET status = ?, body = ?, worker = NULL, num_bytes = num_bytes + ? WHERE seq = ?",
        (response.status, to_json(response.body), sum(map(row_size, rows)), seq),
    )


def _cut(db: Database, seq: int, response: StoredResponse, status: str) -> None:
    """End a response from outside: with the output that its events show, and the events that end them."""
    replay = Replay()
    for chunk in _read_events(db, seq, -1, whole=True):
        for event in read_frames(chunk.data):
            replay.add(event)
    number = _num_events(db, seq)
    frames = replay.close(number)
    output = replay.output()
    error = RESTARTED if status == "failed" else None
    body: dict[str, Any] = {**response.body, "status": status, "error": error, "output": output}
    kind = "response.failed" if status == "failed" else "response.incomplete"
    frames.append(frame(kind, number + len(frames), response=body))
    ended = StoredResponse(
        id=response.id,
        owner=response.owner,
        previous_id=response.previous_id,
        created=response.created,
        status=status,
        body={**body, "output": []},
        input=response.input,
        output=tuple(StoredItem(item) for item in output),
    )
    _conclude(db, seq, ended, EventChunk(number, len(frames), b"".join(frames)))


def count_live(db: Database) -> int:
    return int(db.execute("SELECT COUNT(*) FROM responses WHERE worker IS NOT NULL").fetchone()[0])


def _num_events(db: Database, seq: int) -> int:
    return int(db.execute("SELECT num_events FROM responses WHERE seq = ?", (seq,)).fetchone()[0])


def _read_events(db: Database, seq: int, after: int, *, whole: bool = False) -> list[EventChunk]:
    """Chunks that hold events after number ``after``: a page of them, or all."""
    rows = db.execute(
        "SELECT first, num_events, data FROM events WHERE response_seq = ? AND first >= COALESCE("
        "(SELECT MAX(first) FROM events WHERE response_seq = ? AND first <= ?), 0) ORDER BY first"
        + ("" if whole else f" LIMIT {_PAGE_CHUNKS}"),
        (seq, seq, after + 1),
    )
    chunks: list[EventChunk] = []
    size = 0
    for first, num_events, packed in rows.fetchall():
        if first + num_events <= after + 1:
            continue
        data = zlib.decompress(packed)
        chunks.append(EventChunk(first, num_events, data))
        size += len(data)
        if size > _PAGE_BYTES and not whole:
            break
    return chunks
