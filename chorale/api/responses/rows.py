"""Rows of the response store: objects to columns and back, and the statements on them. No state."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

import msgspec
import numpy as np

from chorale.api.responses.stored import PreviousResponseNotFoundError, StoredItem, StoredResponse

MAX_CHAIN = 10_000  # responses of one chain
TOUCH_SECONDS = 60.0  # a chain that is continued again within this is not marked again


def all_items(response: StoredResponse) -> list[tuple[bool, StoredItem]]:
    return [(False, stored) for stored in response.input] + [(True, stored) for stored in response.output]


def item_row(stored: StoredItem, is_output: bool) -> tuple[bool, str | None, bytes, bytes]:
    item_id = stored.item.get("id")
    tokens = np.asarray(stored.token_ids, dtype="<u4").tobytes()
    return is_output, item_id if isinstance(item_id, str) else None, to_json(stored.item), tokens


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(packed, dtype="<u4").tolist())


to_json = msgspec.json.Encoder().encode


def load_items(connection: sqlite3.Connection, seq: int) -> list[tuple[int, StoredItem]]:
    """(whether it is output, the item), input first."""
    rows = connection.execute(
        "SELECT is_output, item, token_ids FROM items WHERE response_seq = ? ORDER BY position", (seq,)
    )
    return [(is_output, StoredItem(json.loads(item), unpack_tokens(ids))) for is_output, item, ids in rows]


def load(connection: sqlite3.Connection, row: tuple[Any, ...]) -> StoredResponse:
    seq, response_id, owner, previous_id, created, status, body = row
    items = load_items(connection, seq)
    return StoredResponse(
        id=response_id,
        owner=owner,
        previous_id=previous_id,
        created=created,
        status=status,
        body=json.loads(body),
        input=tuple(stored for is_output, stored in items if not is_output),
        output=tuple(stored for is_output, stored in items if is_output),
    )


def delete_row(response_id: str, owner: bytes, oldest: float, connection: sqlite3.Connection) -> bool:
    cursor = connection.execute(
        "DELETE FROM responses WHERE id = ? AND owner = ? AND used >= ?", (response_id, owner, oldest)
    )
    return cursor.rowcount > 0


def totals(connection: sqlite3.Connection) -> tuple[int, int]:
    num, size = connection.execute("SELECT num_responses, num_bytes FROM totals").fetchone()
    return int(num), int(size)


def touch_chain(connection: sqlite3.Connection, response_id: str, owner: bytes, now: float) -> None:
    """Mark a chain as used, so that the beginning of a live conversation is not evicted."""
    connection.execute(
        "WITH RECURSIVE chain (seq, previous_id, depth) AS ("
        " SELECT seq, previous_id, 1 FROM responses WHERE id = ? AND owner = ? AND used < ?"
        " UNION ALL SELECT r.seq, r.previous_id, depth + 1"
        " FROM responses r JOIN chain ON r.id = chain.previous_id WHERE r.owner = ? AND depth < ?)"
        " UPDATE responses SET used = ? WHERE seq IN (SELECT seq FROM chain)",
        (response_id, owner, now - TOUCH_SECONDS, owner, MAX_CHAIN, now),
    )


def not_found(response_id: str, wanted: str | None = None) -> PreviousResponseNotFoundError:
    message = f"no response with id {response_id[:128]!r}"
    if wanted is not None and wanted != response_id:
        message += f", which {wanted!r} continues: it was deleted or has expired"
    return PreviousResponseNotFoundError(message, param="previous_response_id")
