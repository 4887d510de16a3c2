"""Statements on background responses that another server may resume when theirs has died.

A response keeps its request as long as a second attempt cannot contradict the first: no reader has received
events, and no tool with possible side effects has run. The ``server_id`` of a waiting response is
``WAITING``.
"""

from __future__ import annotations

import json
import secrets

from chorale.store.database.sql import Database
from chorale.store.protocol import Claimed, Lease
from chorale.store.responses import COLUMNS, ROW_BYTES, load, to_json
from chorale.store.servers import WAITING

MAX_ATTEMPTS = 2  # bounds how often one response can crash a server
_MOST_WAITING = 16  # per query


def keep_request(db: Database, seq: int, request: bytes) -> None:
    db.execute(
        "UPDATE responses SET request = ?, num_bytes = num_bytes + ? WHERE seq = ?",
        (request, len(request), seq),
    )


def forget_request(db: Database, seq: int) -> None:
    db.execute(
        "UPDATE responses SET num_bytes = num_bytes - length(request), request = NULL"
        " WHERE seq = ? AND request IS NOT NULL",
        (seq,),
    )


def put_back(db: Database, server_id: str, *, in_order: bool) -> list[str]:
    """Puts a server's resumable responses back in the queue. Returns their ids.

    ``in_order``: the server stops orderly, so the attempt does not count.
    """
    rows = db.execute(
        "SELECT seq, id, conversation_id FROM responses WHERE server_id = ? AND request IS NOT NULL"
        " AND attempts < ?",
        (server_id, MAX_ATTEMPTS + in_order),
    ).fetchall()
    for seq, _, conversation_id in rows:
        _forget_events(db, seq)
        _set_waiting(db, seq, server_id, conversation_id, int(in_order))
    return [row[1] for row in rows]


def _set_waiting(db: Database, seq: int, server_id: str, conversation_id: str | None, uncounted: int) -> None:
    body = db.execute("SELECT body FROM responses WHERE seq = ?", (seq,)).fetchone()[0]
    db.execute(
        "UPDATE responses SET status = 'queued', body = ?, server_id = ?, attempts = attempts - ?"
        " WHERE seq = ?",
        (to_json({**json.loads(body), "status": "queued"}), WAITING, uncounted, seq),
    )
    if conversation_id is not None:  # a new token invalidates the old server's
        db.execute(
            "UPDATE conversations SET lease = ?, server_id = ? WHERE id = ? AND server_id = ?",
            (secrets.token_hex(16), WAITING, conversation_id, server_id),
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


def waiting(db: Database) -> list[tuple[str, str]]:
    """Returns (id, model), oldest first."""
    rows = db.execute(
        f"SELECT id, body FROM responses WHERE server_id = ? ORDER BY seq LIMIT {_MOST_WAITING}", (WAITING,)
    )
    return [(response_id, str(json.loads(body).get("model"))) for response_id, body in rows.fetchall()]


def claim(db: Database, response_id: str, server_id: str) -> Claimed | None:
    changed = db.execute(
        "UPDATE responses SET server_id = ?, attempts = attempts + 1 WHERE id = ? AND server_id = ?",
        (server_id, response_id, WAITING),
    )
    if changed.rowcount == 0:
        return None
    row = db.execute(f"SELECT {COLUMNS} FROM responses WHERE id = ?", (response_id,)).fetchone()
    response = load(db, row)
    request = db.execute("SELECT request FROM responses WHERE id = ?", (response_id,)).fetchone()[0]
    lease: Lease | None = None
    if response.conversation_id is not None:
        found = db.execute(
            "UPDATE conversations SET server_id = ? WHERE id = ? AND server_id = ? RETURNING lease",
            (server_id, response.conversation_id, WAITING),
        ).fetchone()
        token = found[0] if found is not None else ""  # deleted: nothing will be added to it
        lease = Lease(response.conversation_id, response.owner, token, response.conversation_end)
    return Claimed(response, bytes(request), lease)


def unclaim(db: Database, response_id: str, server_id: str) -> None:
    """Returns a claimed response to the queue. The attempt does not count."""
    row = db.execute(
        "SELECT seq, conversation_id FROM responses WHERE id = ? AND server_id = ?", (response_id, server_id)
    ).fetchone()
    if row is not None:
        _set_waiting(db, row[0], server_id, row[1], 1)


def free_conversations(db: Database) -> None:
    """Ends the leases of conversations whose waiting response was ended or deleted."""
    db.execute(
        "UPDATE conversations SET lease = NULL, server_id = NULL WHERE server_id = ? AND id NOT IN"
        " (SELECT conversation_id FROM responses WHERE server_id = ? AND conversation_id IS NOT NULL)",
        (WAITING, WAITING),
    )
