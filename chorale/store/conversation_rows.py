"""Statements on conversations: their items, and the lease under which one request at a time appends."""

from __future__ import annotations

import json
from collections.abc import Sequence

from chorale.errors import RequestError
from chorale.ids import new_id
from chorale.store.database.sql import Database
from chorale.store.protocol import (
    KEPT,
    LIVE,
    Conversation,
    ConversationLockedError,
    ItemPage,
    Lease,
    StoredItem,
    StoredResponse,
    StoreError,
)
from chorale.store.responses import ROW_BYTES, item_row, no_conversation, row_size, to_json, unpack_item


def insert_conversation(
    db: Database, conversation: Conversation, items: Sequence[StoredItem], now: float
) -> None:
    metadata = to_json(conversation.metadata)
    seq = db.execute(
        "INSERT INTO conversations (id, owner, created, used, metadata, next_position, num_bytes)"
        " VALUES (?, ?, ?, ?, ?, 0, ?) RETURNING seq",
        (conversation.id, conversation.owner, conversation.created, now, metadata, len(metadata) + ROW_BYTES),
    ).fetchone()[0]
    add_items(db, seq, items, now)


def find(db: Database, conversation_id: str, owner: bytes, oldest: float) -> tuple[int, Conversation]:
    """Returns (seq, the conversation). Raises ``ConversationNotFoundError``."""
    row = db.execute(
        "SELECT seq, created, metadata FROM conversations WHERE id = ? AND owner = ? AND used >= ?",
        (conversation_id, owner, oldest),
    ).fetchone()
    if row is None:
        raise no_conversation(conversation_id)
    return row[0], Conversation(conversation_id, owner, row[1], json.loads(row[2]))


def check_unleased(db: Database, seq: int) -> None:
    """Raises ``ConversationLockedError`` while a request holds the lease."""
    if db.execute("SELECT lease FROM conversations WHERE seq = ?", (seq,)).fetchone()[0] is not None:
        raise ConversationLockedError(
            "Another process is currently operating on this conversation. Please retry in a few seconds.",
            param="conversation",
        )


def set_metadata(db: Database, seq: int, metadata: dict[str, str], now: float) -> None:
    fresh = to_json(metadata)
    db.execute(
        "UPDATE conversations SET num_bytes = num_bytes + ? - length(metadata), metadata = ?, used = ?"
        " WHERE seq = ?",
        (len(fresh), fresh, now, seq),
    )


def add_items(db: Database, seq: int, items: Sequence[StoredItem], now: float) -> list[StoredItem]:
    """Appends items and returns them as stored. An id that the conversation already has is replaced."""
    start = db.execute("SELECT next_position FROM conversations WHERE seq = ?", (seq,)).fetchone()[0]
    added: list[StoredItem] = []
    size = 0
    for position, stored in enumerate(items, start):
        named = _with_free_id(db, seq, stored)
        row = item_row(named)
        db.execute(
            "INSERT INTO conversation_items (conversation_seq, position, id, item, token_ids)"
            " VALUES (?, ?, ?, ?, ?)",
            (seq, position, *row),
        )
        added.append(named)
        size += row_size(row)
    db.execute(
        "UPDATE conversations SET next_position = ?, num_bytes = num_bytes + ?, used = ? WHERE seq = ?",
        (start + len(added), size, now, seq),
    )
    return added


def _with_free_id(db: Database, seq: int, stored: StoredItem) -> StoredItem:
    item_id = stored.item["id"]
    taken = db.execute(
        "SELECT 1 FROM conversation_items WHERE id = ? AND conversation_seq = ?", (item_id, seq)
    ).fetchone()
    if taken is None:
        return stored
    return StoredItem({**stored.item, "id": new_id(item_id.partition("_")[0])}, stored.token_ids)


def find_own_item(db: Database, seq: int, item_id: str) -> StoredItem | None:
    row = db.execute(
        "SELECT item, token_ids FROM conversation_items WHERE id = ? AND conversation_seq = ?", (item_id, seq)
    ).fetchone()
    return unpack_item(*row) if row is not None else None


def remove_item(db: Database, seq: int, item_id: str, now: float) -> bool:
    """Removes an item; with a call, its outputs, which would make every later request a 400."""
    stored = find_own_item(db, seq, item_id)
    if stored is None:
        return False
    removed = [stored]
    if "call_id" in stored.item and not _is_output(stored):
        removed += _outputs_of(db, seq, stored.item["call_id"])
    for gone in removed:
        db.execute(
            "DELETE FROM conversation_items WHERE id = ? AND conversation_seq = ?", (gone.item["id"], seq)
        )
    db.execute(
        "UPDATE conversations SET num_bytes = num_bytes - ?, used = ? WHERE seq = ?",
        (sum(row_size(item_row(gone)) for gone in removed), now, seq),
    )
    return True


def _outputs_of(db: Database, seq: int, call_id: str) -> list[StoredItem]:
    rows = db.execute(
        "SELECT item, token_ids FROM conversation_items WHERE conversation_seq = ?", (seq,)
    ).fetchall()
    items = [unpack_item(*row) for row in rows]
    return [stored for stored in items if _is_output(stored) and stored.item.get("call_id") == call_id]


def _is_output(stored: StoredItem) -> bool:
    return str(stored.item["type"]).endswith("_output")


def load_page(db: Database, seq: int, *, after: str | None, limit: int, newest_first: bool) -> ItemPage:
    """Raises ``RequestError`` for an ``after`` that is not in the conversation."""
    start = -1 if not newest_first else 1 << 62
    if after is not None:
        row = db.execute(
            "SELECT position FROM conversation_items WHERE id = ? AND conversation_seq = ?", (after, seq)
        ).fetchone()
        if row is None:
            raise RequestError(f"after: {after[:128]!r} is not an item of this conversation", param="after")
        start = row[0]
    sign, order = ("<", "DESC") if newest_first else (">", "ASC")
    rows = db.execute(
        f"SELECT item, token_ids FROM conversation_items WHERE conversation_seq = ? AND position {sign} ?"
        f" ORDER BY position {order} LIMIT ?",
        (seq, start, limit + 1),
    ).fetchall()
    return ItemPage(tuple(unpack_item(*row) for row in rows[:limit]), len(rows) > limit)


# --------------------------------------------------------------------------- leases


def take_lease(db: Database, conversation: Conversation, seq: int, token: str, server_id: str) -> Lease:
    """Takes the lease. Raises ``ConversationLockedError``."""
    check_unleased(db, seq)
    end = db.execute(
        "UPDATE conversations SET lease = ?, server_id = ? WHERE seq = ? RETURNING next_position",
        (token, server_id, seq),
    ).fetchone()[0]
    return Lease(conversation.id, conversation.owner, token, end)


def release_lease(db: Database, lease: Lease, items: Sequence[StoredItem], now: float) -> None:
    """Appends the items and ends the lease. A conversation deleted meanwhile is not an error.

    Raises ``StoreError`` if there are items and the lease has expired: another request may have continued
    from the same position.
    """
    row = db.execute("SELECT seq, lease FROM conversations WHERE id = ?", (lease.conversation_id,)).fetchone()
    if row is None:
        return
    seq, token = row
    if token != lease.token:
        if items:
            raise StoreError("this server was taken for dead, and its lease on the conversation is lost")
        return
    if items:
        add_items(db, seq, items, now)
    db.execute("UPDATE conversations SET lease = NULL, server_id = NULL WHERE seq = ?", (seq,))


def finish_lease(db: Database, lease: Lease, response: StoredResponse, now: float) -> None:
    """Appends the items of an ended response to its conversation and ends the lease."""
    assert response.status not in LIVE
    kept = response.status in KEPT
    release_lease(db, lease, (*response.input, *response.output) if kept else (), now)


def free_all(db: Database, server_id: str) -> None:
    """Ends all leases of a dead server."""
    db.execute("UPDATE conversations SET lease = NULL, server_id = NULL WHERE server_id = ?", (server_id,))
