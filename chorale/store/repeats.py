"""Statements on background responses that may be begun again after their server has died.

A response keeps its request as long as nothing of it was shown or done that a second attempt could
contradict: no reader has more than the events of its beginning, and no tool has run that may have changed
something. While it waits for a server its worker is ``WAITING``, which never lives and never dies.
"""

from __future__ import annotations

import json
import secrets

from chorale.store.database import Database
from chorale.store.protocol import Claimed, Hold
from chorale.store.responses import COLUMNS, ROW_BYTES, load, to_json

WAITING = "waiting"
MAX_ATTEMPTS = 2  # a response that takes its server down must not do so for ever
_MOST_WAITING = 16  # of one look


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


def put_back(db: Database, worker: str, *, in_order: bool) -> list[str]:
    """Let those of a worker's responses wait for another one that may be begun again; their ids.

    ``in_order``: the worker ends as it was asked to, so that its attempt does not count.
    """
    rows = db.execute(
        "SELECT seq, id, conversation_id FROM responses WHERE worker = ? AND request IS NOT NULL"
        " AND attempts < ?",
        (worker, MAX_ATTEMPTS + in_order),
    ).fetchall()
    for seq, _, conversation_id in rows:
        _truncate(db, seq)
        _set_waiting(db, seq, worker, conversation_id, int(in_order))
    return [row[1] for row in rows]


def _set_waiting(db: Database, seq: int, worker: str, conversation_id: str | None, uncounted: int) -> None:
    body = db.execute("SELECT body FROM responses WHERE seq = ?", (seq,)).fetchone()[0]
    db.execute(
        "UPDATE responses SET status = 'queued', body = ?, worker = ?, attempts = attempts - ? WHERE seq = ?",
        (to_json({**json.loads(body), "status": "queued"}), WAITING, uncounted, seq),
    )
    if conversation_id is not None:  # with a new token: the old worker can do nothing more to it
        db.execute(
            "UPDATE conversations SET locked = ?, worker = ? WHERE id = ? AND worker = ?",
            (secrets.token_hex(16), WAITING, conversation_id, worker),
        )


def _truncate(db: Database, seq: int) -> None:
    """Forget the events behind the first chunk, which are those of the beginning."""
    later = "FROM events WHERE response_seq = ? AND first > 0"
    size, num_chunks = db.execute(
        f"SELECT COALESCE(SUM(length(data)), 0), COUNT(*) {later}", (seq,)
    ).fetchone()
    db.execute(f"DELETE {later}", (seq,))
    db.execute(
        "UPDATE responses SET num_bytes = num_bytes - ?, num_events = COALESCE("
        "(SELECT MAX(first + num_events) FROM events WHERE response_seq = ?), 0) WHERE seq = ?",
        (int(size) + num_chunks * (ROW_BYTES // 8), seq, seq),
    )


def waiting(db: Database) -> list[tuple[str, str]]:
    """(id, model), oldest first."""
    rows = db.execute(
        f"SELECT id, body FROM responses WHERE worker = ? ORDER BY seq LIMIT {_MOST_WAITING}", (WAITING,)
    )
    return [(response_id, str(json.loads(body).get("model"))) for response_id, body in rows.fetchall()]


def claim(db: Database, response_id: str, worker: str) -> Claimed | None:
    changed = db.execute(
        "UPDATE responses SET worker = ?, attempts = attempts + 1 WHERE id = ? AND worker = ?",
        (worker, response_id, WAITING),
    )
    if changed.rowcount == 0:
        return None
    row = db.execute(f"SELECT {COLUMNS} FROM responses WHERE id = ?", (response_id,)).fetchone()
    response = load(db, row)
    request = db.execute("SELECT request FROM responses WHERE id = ?", (response_id,)).fetchone()[0]
    hold: Hold | None = None
    if response.conversation_id is not None:
        found = db.execute(
            "UPDATE conversations SET worker = ? WHERE id = ? AND worker = ? RETURNING locked",
            (worker, response.conversation_id, WAITING),
        ).fetchone()
        token = found[0] if found is not None else ""  # deleted: nothing will be added to it
        hold = Hold(response.conversation_id, response.owner, token, response.conversation_end)
    return Claimed(response, bytes(request), hold)


def unclaim(db: Database, response_id: str, worker: str) -> None:
    """Give a claimed response back, with nothing done for it. The attempt does not count."""
    row = db.execute(
        "SELECT seq, conversation_id FROM responses WHERE id = ? AND worker = ?", (response_id, worker)
    ).fetchone()
    if row is not None:
        _set_waiting(db, row[0], worker, row[1], 1)


def free_conversations(db: Database) -> None:
    """Let go of conversations whose waiting response was ended or deleted."""
    db.execute(
        "UPDATE conversations SET locked = NULL, worker = NULL WHERE worker = ? AND id NOT IN"
        " (SELECT conversation_id FROM responses WHERE worker = ? AND conversation_id IS NOT NULL)",
        (WAITING, WAITING),
    )
