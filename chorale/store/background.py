"""BackgroundResponses: background responses in the store, and all changes of their status.

Every change has ``server_id`` in its WHERE clause. Ending a response sets it to NULL in the same
transaction, so a response ends once: by its owner, a cancellation or the expiry of its server.

The row of a response contains its request as long as a second attempt cannot contradict the first: no reader
has received events, and no tool with possible side effects has run. If the server of a
response with a request dies or stops, the response waits for another server.
"""

from __future__ import annotations

import json
import secrets
import zlib
from typing import Any

from chorale.store.access import Access, Rows, reads, writes
from chorale.store.conversations import finish_lease
from chorale.store.database.sql import Database
from chorale.store.jobs import WAITING, owned, register, take
from chorale.store.protocol import RESPONSE_ID, Claimed, EventChunk, EventPage, Lease, Recover, StoredResponse
from chorale.store.responses import (
    COLUMNS,
    ROW_BYTES,
    find_response,
    insert_items,
    insert_response,
    item_row,
    read_response,
    row_size,
    to_json,
)

MAX_ATTEMPTS = 2  # bounds how often one response can crash a server
_MOST_WAITING = 16  # waiting responses per query
_PAGE_CHUNKS = 64  # most chunks in an ``EventPage``
_PAGE_BYTES = 2**16  # an ``EventPage`` ends with the chunk that exceeds this size


class BackgroundResponses(Rows):
    """Responses that are stored before they end, each owned by one server process.

    The status only moves forward: queued, in_progress, a final status. If its server dies, a response is
    ``queued`` again, without owner and events, if it may be resumed and has had fewer than ``MAX_ATTEMPTS``
    attempts; otherwise it fails. Methods that return whether they succeeded return False when this server no
    longer owns the response, because it was ended elsewhere or deleted.
    """

    def __init__(self, access: Access, recover: Recover) -> None:
        super().__init__(access)
        self._recover = recover

    @writes
    def begin(
        self, db: Database, response: StoredResponse, server_id: str, request: bytes | None = None
    ) -> None:
        """Stores a queued response. ``request``: data for resuming it, or None."""
        register(db, server_id)
        seq = insert_response(db, response, self.now, server_id)
        if request is not None:
            db.execute(
                "UPDATE responses SET request = ?, num_bytes = num_bytes + ? WHERE seq = ?",
                (request, len(request), seq),
            )
        self._access.evict(db)

    @writes
    def append(
        self,
        db: Database,
        response_id: str,
        server_id: str,
        status: str,
        events: EventChunk,
        *,
        repeatable: bool = True,
    ) -> bool:
        """Appends events. ``repeatable`` False: the response may not be resumed from now on."""
        row = owned(db, "responses", "seq, status, body", response_id, server_id)
        if row is None:
            return False
        seq, before, body = row
        if before != status:
            fresh = to_json({**json.loads(body), "status": status})
            db.execute(
                "UPDATE responses SET status = ?, num_bytes = num_bytes + ? - length(body), body = ?"
                " WHERE seq = ?",
                (status, len(fresh), fresh, seq),
            )
        _add_events(db, seq, events)
        if not repeatable:
            _forget_request(db, seq)
        return True

    @writes
    def settle(self, db: Database, response_id: str, owner: bytes) -> None:
        """Marks the response as not resumable. Called before a reader gets its events."""
        row = _live(db, "seq", response_id, owner)
        if row is not None:
            _forget_request(db, row[0])

    @reads
    def waiting(self, db: Database) -> list[tuple[str, str]]:
        """Returns (id, model) of responses that wait for a server, oldest first."""
        rows = db.execute(
            f"SELECT id, body FROM responses WHERE server_id = ? ORDER BY seq LIMIT {_MOST_WAITING}",
            (WAITING,),
        )
        return [(response_id, str(json.loads(body).get("model"))) for response_id, body in rows.fetchall()]

    @writes
    def claim(self, db: Database, response_id: str, server_id: str) -> Claimed | None:
        """Claims a waiting response. Returns None if another server claimed it, or if it was deleted."""
        if not take(db, "responses", response_id, server_id):
            return None
        *row, request = owned(db, "responses", f"{COLUMNS}, request", response_id, server_id)
        response = read_response(db, row)
        lease: Lease | None = None
        if response.conversation_id is not None:
            found = db.execute(
                "UPDATE conversations SET server_id = ? WHERE id = ? AND server_id = ? RETURNING lease",
                (server_id, response.conversation_id, WAITING),
            ).fetchone()
            token = found[0] if found is not None else ""  # the conversation was deleted
            lease = Lease(response.conversation_id, response.owner, token, response.conversation_end)
        return Claimed(response, bytes(request), lease)

    @writes
    def put_back(self, db: Database, server_id: str, response_id: str | None = None) -> list[str]:
        """Queues resumable responses of this server, or one of them, for another server. Returns their ids.

        The attempt is not counted.
        """
        return put_back(db, server_id, response_id)

    @writes
    def finish(
        self,
        db: Database,
        response: StoredResponse,
        server_id: str,
        events: EventChunk,
        lease: Lease | None = None,
    ) -> bool:
        """Stores the final status, the output and the last events, and ends the lease."""
        row = owned(db, "responses", "seq", response.id, server_id)
        if row is None:
            return False
        if lease is not None:
            finish_lease(db, lease, response, self.now)
        _conclude(db, row[0], response, events)
        return True

    @writes
    def end(self, db: Database, response_id: str, owner: bytes, status: str) -> StoredResponse | None:
        """Ends a response of any server as ``cancelled`` or ``failed``. Does nothing if it has ended."""
        if not RESPONSE_ID.fullmatch(response_id):
            return None
        row = _live(db, COLUMNS, response_id, owner)
        if row is not None:
            _end_lost(db, row, status, self._recover)
            free_conversations(db)
        return find_response(db, response_id, owner, self._access.oldest())

    @reads
    def events(self, db: Database, response_id: str, owner: bytes, start: int) -> EventPage | None:
        """Returns the events from event number ``start``, which must be the first of a chunk."""
        if not RESPONSE_ID.fullmatch(response_id):
            return None
        row = db.execute(
            "SELECT seq, server_id, request IS NOT NULL FROM responses"
            " WHERE id = ? AND owner = ? AND used >= ?",
            (response_id, owner, self._access.oldest()),
        ).fetchone()
        if row is None:
            return None
        seq, server_id, repeatable = row
        return EventPage(server_id is not None, bool(repeatable), tuple(_read_events(db, seq, start)))

    @writes
    def fail(self, db: Database, server_id: str, response_ids: set[str]) -> None:
        """Fails responses that the server owns but does not run."""
        for response_id in response_ids:
            row = owned(db, "responses", COLUMNS, response_id, server_id)
            if row is not None:
                _end_lost(db, row, "failed", self._recover)


# --------------------------------------------------------------------------- statements


def put_back(
    db: Database, server_id: str, response_id: str | None = None, *, died: bool = False
) -> list[str]:
    """Queues a server's resumable responses, or one of them, for another server. Returns their ids.

    ``died``: the server has died, so the attempt is counted.
    """
    rows = db.execute(
        "SELECT seq, id, body, conversation_id FROM responses WHERE server_id = ? AND id = COALESCE(?, id)"
        " AND request IS NOT NULL AND attempts + ? < ?",
        (server_id, response_id, int(died), MAX_ATTEMPTS),
    ).fetchall()
    for seq, _, body, conversation_id in rows:
        _forget_events(db, seq)
        db.execute(
            "UPDATE responses SET status = 'queued', body = ?, server_id = ?, attempts = attempts + ?"
            " WHERE seq = ?",
            (to_json({**json.loads(body), "status": "queued"}), WAITING, int(died), seq),
        )
        # A new token invalidates the old server's lease.
        db.execute(
            "UPDATE conversations SET lease = ?, server_id = ? WHERE id = ? AND server_id = ?",
            (secrets.token_hex(16), WAITING, conversation_id, server_id),
        )
    return [row[1] for row in rows]


def fail_all(db: Database, server_id: str, recover: Recover) -> list[str]:
    """Fails all responses of a dead server. Returns their ids."""
    rows = db.execute(f"SELECT {COLUMNS} FROM responses WHERE server_id = ?", (server_id,)).fetchall()
    for row in rows:
        _end_lost(db, row, "failed", recover)
    return [row[1] for row in rows]


def free_conversations(db: Database) -> None:
    """Ends the leases of conversations whose waiting response was ended or deleted."""
    db.execute(
        "UPDATE conversations SET lease = NULL, server_id = NULL WHERE server_id = ? AND id NOT IN"
        " (SELECT conversation_id FROM responses WHERE server_id = ? AND conversation_id IS NOT NULL)",
        (WAITING, WAITING),
    )


def count_live(db: Database) -> int:
    return int(db.execute("SELECT COUNT(*) FROM responses WHERE server_id IS NOT NULL").fetchone()[0])


def _live(db: Database, columns: str, response_id: str, owner: bytes) -> Any:
    query = f"SELECT {columns} FROM responses WHERE id = ? AND owner = ? AND server_id IS NOT NULL"
    return db.execute(query, (response_id, owner)).fetchone()


def _forget_request(db: Database, seq: int) -> None:
    db.execute(
        "UPDATE responses SET num_bytes = num_bytes - length(request), request = NULL"
        " WHERE seq = ? AND request IS NOT NULL",
        (seq,),
    )


def _forget_events(db: Database, seq: int) -> None:
    size, num_chunks = db.execute(
        "SELECT COALESCE(SUM(length(data)), 0), COUNT(*) FROM events WHERE response_seq = ?", (seq,)
    ).fetchone()
    db.execute("DELETE FROM events WHERE response_seq = ?", (seq,))
    db.execute(
        "UPDATE responses SET num_bytes = num_bytes - ?, num_events = 0 WHERE seq = ?",
        (int(size) + num_chunks * (ROW_BYTES // 8), seq),
    )


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
    _forget_request(db, seq)
    rows = list(map(item_row, response.output))
    insert_items(db, seq, rows, start=len(response.input), is_output=True)
    body = to_json(response.body)
    db.execute(
        "UPDATE responses SET status = ?, num_bytes = num_bytes + ? - length(body), body = ?,"
        " server_id = NULL WHERE seq = ?",
        (response.status, len(body) + sum(map(row_size, rows)), body, seq),
    )


def _end_lost(db: Database, row: tuple[Any, ...], status: str, recover: Recover) -> None:
    """Ends a response in place of its owner, with the output in its events. ``row``: its ``COLUMNS``."""
    response, chunks = read_response(db, row), _read_events(db, row[0], 0, whole=True)
    ended, data, num_events = recover(response, [chunk.data for chunk in chunks], status)
    first = chunks[-1].first + chunks[-1].num_events if chunks else 0
    _conclude(db, row[0], ended, EventChunk(first, num_events, data))


def _read_events(db: Database, seq: int, start: int, *, whole: bool = False) -> list[EventChunk]:
    """Returns the chunks from event ``start``: those of one ``EventPage``, or all if ``whole``."""
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
