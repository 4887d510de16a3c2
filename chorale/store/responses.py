"""Rows of the response store: conversion of objects to columns and back, and statements on responses."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from chorale.errors import ContextLengthError, RequestError
from chorale.store.database.sql import Database
from chorale.store.protocol import (
    LIVE,
    TOOL_STATE,
    ConversationNotFoundError,
    PreviousResponseNotFoundError,
    StoredItem,
    StoredResponse,
)

MAX_CHAIN = 10_000  # most responses in a chain
MAX_CHAIN_BYTES = 64 * 2**20  # maximum size of a chain, a hundred times the context window
TOUCH_SECONDS = 60.0  # a chain is marked as used at most once per this interval
ROW_BYTES = 512  # approximate overhead of a row and its index entries
COLUMNS = "seq, id, owner, previous_id, created, status, body, conversation_id, conversation_end"

to_json = msgspec.json.Encoder().encode


# --------------------------------------------------------------------------- items


ItemRow = tuple[str | None, bytes, bytes]


def item_row(stored: StoredItem) -> ItemRow:
    """Returns (id, item, token ids)."""
    item_id = stored.item.get("id")
    return item_id if isinstance(item_id, str) else None, to_json(stored.item), pack_tokens(stored.token_ids)


def row_size(row: ItemRow) -> int:
    return len(row[1]) + len(row[2]) + ROW_BYTES


def pack_tokens(token_ids: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_item(item: bytes, token_ids: bytes) -> StoredItem:
    return StoredItem(msgspec.json.decode(item), struct.unpack(f"<{len(token_ids) // 4}I", token_ids))


def insert_items(db: Database, seq: int, rows: list[ItemRow], *, start: int, is_output: bool) -> None:
    """Writes items, the first at position ``start``."""
    db.executemany(
        "INSERT INTO items (response_seq, position, is_output, id, item, token_ids)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        [(seq, start + position, int(is_output), *row) for position, row in enumerate(rows)],
    )


def read_items(db: Database, seq: int) -> list[tuple[int, StoredItem]]:
    """Returns pairs (1 for output or 0 for input, item), inputs first."""
    rows = db.execute(
        "SELECT is_output, item, token_ids FROM items WHERE response_seq = ? ORDER BY position", (seq,)
    )
    return [(is_output, unpack_item(item, ids)) for is_output, item, ids in rows.fetchall()]


def find_item(db: Database, item_id: str, owner: bytes, oldest: float) -> StoredItem | None:
    """Returns an item of any response or conversation, preferably one with the model's token ids."""
    row = db.execute(
        "SELECT item, token_ids FROM ("
        " SELECT item, token_ids FROM items JOIN responses ON seq = response_seq"
        " WHERE items.id = ? AND owner = ? AND used >= ?"
        " UNION ALL SELECT item, token_ids FROM conversation_items"
        " JOIN conversations ON seq = conversation_seq"
        " WHERE conversation_items.id = ? AND owner = ? AND used >= ?"
        ") AS found ORDER BY length(token_ids) DESC LIMIT 1",
        (item_id, owner, oldest) * 2,
    ).fetchone()
    return unpack_item(*row) if row is not None else None


# --------------------------------------------------------------------------- responses


def insert_response(db: Database, response: StoredResponse, now: float, server_id: str | None = None) -> int:
    """Writes the response and its items, and marks its predecessors as used. Returns its ``seq``."""
    body = to_json(response.body)
    inputs, outputs = list(map(item_row, response.input)), list(map(item_row, response.output))
    size = len(body) + ROW_BYTES + sum(map(row_size, inputs)) + sum(map(row_size, outputs))
    seq = db.execute(
        "INSERT INTO responses (id, owner, previous_id, created, used, status, body, num_bytes, server_id,"
        " conversation_id, conversation_end) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING seq",
        (
            response.id, response.owner, response.previous_id, response.created, now, response.status, body,
            size, server_id, response.conversation_id, response.conversation_end,
        ),
    ).fetchone()[0]  # fmt: skip
    insert_items(db, seq, inputs, start=0, is_output=False)
    insert_items(db, seq, outputs, start=len(inputs), is_output=True)
    if response.previous_id is not None:
        touch_chain(db, response.previous_id, response.owner, now)
    if response.conversation_id is not None:
        db.execute(
            "UPDATE conversations SET used = ? WHERE id = ? AND owner = ?",
            (now, response.conversation_id, response.owner),
        )
    return int(seq)


def find_response(db: Database, response_id: str, owner: bytes, oldest: float) -> StoredResponse | None:
    row = db.execute(
        f"SELECT {COLUMNS} FROM responses WHERE id = ? AND owner = ? AND used >= ?",
        (response_id, owner, oldest),
    ).fetchone()
    return read_response(db, row) if row is not None else None


def find_tool_state(db: Database, item_id: str, owner: bytes, oldest: float) -> dict[str, Any] | None:
    """Returns the tool state of the newest response that has the item in its output."""
    row = db.execute(
        "SELECT body FROM responses JOIN items ON response_seq = seq"
        " WHERE items.id = ? AND is_output = 1 AND owner = ? AND used >= ? ORDER BY seq DESC LIMIT 1",
        (item_id, owner, oldest),
    ).fetchone()
    state: dict[str, Any] | None = json.loads(row[0]).get(TOOL_STATE) if row is not None else None
    return state


def read_response(db: Database, row: Sequence[Any]) -> StoredResponse:
    seq, response_id, owner, previous_id, created, status, body, conversation_id, conversation_end = row
    items = read_items(db, seq)
    return StoredResponse(
        id=response_id,
        owner=bytes(owner),
        previous_id=previous_id,
        created=created,
        status=status,
        body=json.loads(body),
        input=tuple(stored for is_output, stored in items if not is_output),
        output=tuple(stored for is_output, stored in items if is_output),
        conversation_id=conversation_id,
        conversation_end=conversation_end,
    )


def delete_response(db: Database, response_id: str, owner: bytes, oldest: float) -> bool:
    cursor = db.execute(
        "DELETE FROM responses WHERE id = ? AND owner = ? AND used >= ?", (response_id, owner, oldest)
    )
    return bool(cursor.rowcount > 0)


# The responses of a chain, oldest first, with their items, up to the first one that makes it too long.
_CHAIN = (
    "WITH RECURSIVE chain (seq, previous_id, status, conversation_id, conversation_end, depth, size) AS ("
    " SELECT seq, previous_id, status, conversation_id, conversation_end, 1, num_bytes"
    " FROM responses WHERE id = ? AND owner = ? AND used >= ?"
    " UNION ALL SELECT r.seq, r.previous_id, r.status, r.conversation_id, r.conversation_end,"
    " depth + 1, size + r.num_bytes FROM chain JOIN responses r ON r.id = chain.previous_id"
    " WHERE r.owner = ? AND r.used >= ? AND depth <= ? AND size <= ?)"
    " SELECT depth > ? OR size > ?, previous_id, status, conversation_id, conversation_end, item, token_ids"
    " FROM chain LEFT JOIN items ON response_seq = seq ORDER BY depth DESC, position"
)


def read_chain(db: Database, response_id: str, owner: bytes, oldest: float) -> list[StoredItem]:
    """Implements ``ResponseStore.chain``, including the conversation that the oldest response continued."""
    values = (response_id, owner, oldest, owner, oldest, *(MAX_CHAIN, MAX_CHAIN_BYTES) * 2)
    rows = db.execute(_CHAIN, values).fetchall()
    if not rows:
        raise not_found(response_id)
    is_too_long, previous_id, _, conversation_id, end, *_ = rows[0]
    if is_too_long:
        raise too_long("previous_response_id")
    for status in {row[2] for row in rows} & set(LIVE):
        raise _not_ended(response_id, status)
    if previous_id is not None:
        raise not_found(previous_id, wanted=response_id)
    own = [unpack_item(row[5], row[6]) for row in rows if row[5] is not None]  # a response may have no items
    if conversation_id is None:
        return own
    return read_conversation(db, conversation_id, owner, oldest, end=end) + own


def read_conversation(
    db: Database, conversation_id: str, owner: bytes, oldest: float, end: int | None = None
) -> list[StoredItem]:
    """Returns the items before position ``end``. Raises if the conversation is missing or too large."""
    row = db.execute(
        "SELECT seq, num_bytes, next_position FROM conversations WHERE id = ? AND owner = ? AND used >= ?",
        (conversation_id, owner, oldest),
    ).fetchone()
    if row is None:
        raise no_conversation(conversation_id)
    seq, num_bytes, next_position = row
    if num_bytes > MAX_CHAIN_BYTES:
        raise too_long("conversation")
    rows = db.execute(
        "SELECT item, token_ids FROM conversation_items WHERE conversation_seq = ? AND position < ?"
        " ORDER BY position",
        (seq, next_position if end is None else end),
    )
    return [unpack_item(*row) for row in rows.fetchall()]


def totals(db: Database) -> tuple[int, int, int]:
    """Returns (responses, bytes, conversations)."""
    num, size, conversations = db.execute(
        "SELECT num_responses, num_bytes, num_conversations FROM totals"
    ).fetchone()
    return int(num), int(size), int(conversations)


def touch_chain(db: Database, response_id: str, owner: bytes, now: float) -> None:
    """Marks a chain as used, so that the beginning of a live conversation is not evicted."""
    db.execute(
        "WITH RECURSIVE chain (seq, previous_id, depth) AS ("
        " SELECT seq, previous_id, 1 FROM responses WHERE id = ? AND owner = ? AND used < ?"
        " UNION ALL SELECT r.seq, r.previous_id, depth + 1"
        " FROM responses r JOIN chain ON r.id = chain.previous_id WHERE r.owner = ? AND depth < ?)"
        " UPDATE responses SET used = ? WHERE seq IN (SELECT seq FROM chain)",
        (response_id, owner, now - TOUCH_SECONDS, owner, MAX_CHAIN, now),
    )


# --------------------------------------------------------------------------- errors


def not_found(response_id: str, wanted: str | None = None) -> PreviousResponseNotFoundError:
    message = f"no response with id {response_id[:128]!r}"
    if wanted is not None and wanted != response_id:
        message += f", which {wanted!r} continues: it was deleted or has expired"
    return PreviousResponseNotFoundError(message, param="previous_response_id")


def no_conversation(conversation_id: str) -> ConversationNotFoundError:
    return ConversationNotFoundError(
        f"no conversation with id {conversation_id[:128]!r}", param="conversation"
    )


def _not_ended(response_id: str, status: str) -> RequestError:
    return RequestError(
        f"response {response_id!r} cannot be continued before it has ended: it is {status}",
        param="previous_response_id",
        code="previous_response_not_ended",
    )


def too_long(param: str) -> ContextLengthError:
    return ContextLengthError("the stored conversation is too long to continue", param=param)
