"""Conversations: conversations in the store, and the lease that lets one request at a time append."""

from __future__ import annotations

import json
from collections.abc import Sequence

from chorale.errors import NotFoundError
from chorale.ids import new_id
from chorale.store.access import Rows, reads, writes
from chorale.store.database.sql import Database, Page, Paged, read_page
from chorale.store.jobs import register
from chorale.store.protocol import (
    CONVERSATION_ID,
    KEPT,
    LIVE,
    Conversation,
    ConversationLockedError,
    Lease,
    StoredItem,
    StoredResponse,
    StoreError,
)
from chorale.store.responses import (
    ROW_BYTES,
    item_row,
    no_conversation,
    read_conversation,
    row_size,
    to_json,
    unpack_item,
)

_ITEMS = Paged("conversation_items", scope="conversation_seq", key="position")


class Conversations(Rows):
    """Methods may raise ``NotFoundError``, also for items, or ``ConversationLockedError`` during a lease."""

    @writes
    def create(
        self, db: Database, owner: bytes, metadata: dict[str, str], items: Sequence[StoredItem]
    ) -> Conversation:
        made, data = Conversation(new_id("conv"), owner, self.now, metadata), to_json(metadata)
        seq = db.execute(
            "INSERT INTO conversations (id, owner, created, used, metadata, next_position, num_bytes)"
            " VALUES (?, ?, ?, ?, ?, 0, ?) RETURNING seq",
            (made.id, owner, made.created, made.created, data, len(data) + ROW_BYTES),
        ).fetchone()[0]
        _add_items(db, seq, items, made.created)
        self._access.evict(db)
        return made

    @reads
    def get(self, db: Database, conversation_id: str, owner: bytes) -> Conversation:
        return self._find(db, conversation_id, owner)[1]

    @writes
    def update(
        self, db: Database, conversation_id: str, owner: bytes, metadata: dict[str, str]
    ) -> Conversation:
        seq, found = self._find(db, conversation_id, owner)
        data = to_json(metadata)
        db.execute(
            "UPDATE conversations SET num_bytes = num_bytes + ? - length(metadata), metadata = ?, used = ?"
            " WHERE seq = ?",
            (len(data), data, self.now, seq),
        )
        return Conversation(found.id, owner, found.created, metadata)

    @writes
    def delete(self, db: Database, conversation_id: str, owner: bytes) -> None:
        seq, _ = self._find(db, conversation_id, owner)
        db.execute("DELETE FROM conversations WHERE seq = ?", (seq,))

    @reads
    def history(self, db: Database, conversation_id: str, owner: bytes) -> list[StoredItem]:
        """Returns all items, oldest first. Raises ``ContextLengthError`` if they are too large."""
        _check(conversation_id)
        return read_conversation(db, conversation_id, owner, self._access.oldest())

    @reads
    def page(
        self, db: Database, conversation_id: str, owner: bytes, page: Page
    ) -> tuple[list[StoredItem], bool]:
        """Returns (items, whether more follow). Raises as ``read_page``."""
        seq, _ = self._find(db, conversation_id, owner)
        rows, has_more = read_page(db, _ITEMS, seq, "item, token_ids", page)
        return [unpack_item(*row) for row in rows], has_more

    @reads
    def item(self, db: Database, conversation_id: str, owner: bytes, item_id: str) -> StoredItem:
        return _find_item(db, self._find(db, conversation_id, owner)[0], item_id)

    @writes
    def append(
        self, db: Database, conversation_id: str, owner: bytes, items: Sequence[StoredItem]
    ) -> list[StoredItem]:
        """Appends items and returns them as stored. An id already in the conversation is replaced."""
        seq, _ = self._find(db, conversation_id, owner)
        _check_unleased(db, seq)
        added = _add_items(db, seq, items, self.now)
        self._access.evict(db)
        return added

    @writes
    def remove(self, db: Database, conversation_id: str, owner: bytes, item_id: str) -> Conversation:
        """Removes an item. Returns the conversation."""
        seq, found = self._find(db, conversation_id, owner)
        _check_unleased(db, seq)
        _remove_item(db, seq, item_id, self.now)
        return found

    @writes
    def take(self, db: Database, conversation_id: str, owner: bytes, server_id: str) -> Lease:
        """Takes the lease. Raises ``ConversationLockedError`` if another request has it."""
        seq, _ = self._find(db, conversation_id, owner)
        _check_unleased(db, seq)
        register(db, server_id)
        token = new_id("lease")
        end = db.execute(
            "UPDATE conversations SET lease = ?, server_id = ? WHERE seq = ? RETURNING next_position",
            (token, server_id, seq),
        ).fetchone()[0]
        return Lease(conversation_id, owner, token, end)

    @writes
    def release(self, db: Database, lease: Lease, items: Sequence[StoredItem] = ()) -> None:
        """Appends ``items`` and ends the lease. Does nothing if the conversation was deleted."""
        _release(db, lease, items, self.now)

    def _find(self, db: Database, conversation_id: str, owner: bytes) -> tuple[int, Conversation]:
        """Returns (``seq``, conversation). Raises ``ConversationNotFoundError``."""
        _check(conversation_id)
        row = db.execute(
            "SELECT seq, created, metadata FROM conversations WHERE id = ? AND owner = ? AND used >= ?",
            (conversation_id, owner, self._access.oldest()),
        ).fetchone()
        if row is None:
            raise no_conversation(conversation_id)
        return row[0], Conversation(conversation_id, owner, row[1], json.loads(row[2]))


# --------------------------------------------------------------------------- statements


def _check(conversation_id: str) -> None:
    """Raises ``ConversationNotFoundError`` for malformed ids, without a query."""
    if not CONVERSATION_ID.fullmatch(conversation_id):
        raise no_conversation(conversation_id)


def _check_unleased(db: Database, seq: int) -> None:
    """Raises ``ConversationLockedError`` while a request holds the lease."""
    if db.execute("SELECT lease FROM conversations WHERE seq = ?", (seq,)).fetchone()[0] is not None:
        raise ConversationLockedError(
            "Another process is currently operating on this conversation. Please retry in a few seconds.",
            param="conversation",
        )


def _add_items(db: Database, seq: int, items: Sequence[StoredItem], now: float) -> list[StoredItem]:
    """Appends items and returns them as stored. An id already in the conversation is replaced."""
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


def _find_item(db: Database, seq: int, item_id: str) -> StoredItem:
    """Raises ``NotFoundError``."""
    row = db.execute(
        "SELECT item, token_ids FROM conversation_items WHERE id = ? AND conversation_seq = ?", (item_id, seq)
    ).fetchone()
    if row is None:
        message = f"no item with id {item_id[:128]!r} in this conversation"
        raise NotFoundError(message, param="item_id", code="item_not_found")
    return unpack_item(*row)


def _remove_item(db: Database, seq: int, item_id: str, now: float) -> None:
    """Removes an item. A call is removed with its outputs, which alone would make later requests fail."""
    stored = _find_item(db, seq, item_id)
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


def _outputs_of(db: Database, seq: int, call_id: str) -> list[StoredItem]:
    rows = db.execute(
        "SELECT item, token_ids FROM conversation_items WHERE conversation_seq = ?", (seq,)
    ).fetchall()
    items = [unpack_item(*row) for row in rows]
    return [stored for stored in items if _is_output(stored) and stored.item.get("call_id") == call_id]


def _is_output(stored: StoredItem) -> bool:
    return str(stored.item["type"]).endswith("_output")


def _release(db: Database, lease: Lease, items: Sequence[StoredItem], now: float) -> None:
    """Appends the items and ends the lease. Does nothing if the conversation was deleted.

    Raises ``StoreError`` if there are items and the lease has expired: another request may have continued
    the conversation.
    """
    row = db.execute("SELECT seq, lease FROM conversations WHERE id = ?", (lease.conversation_id,)).fetchone()
    if row is None:
        return
    seq, token = row
    if token != lease.token:
        if items:
            raise StoreError("this server was declared dead and has lost its lease on the conversation")
        return
    if items:
        _add_items(db, seq, items, now)
    db.execute("UPDATE conversations SET lease = NULL, server_id = NULL WHERE seq = ?", (seq,))


def finish_lease(db: Database, lease: Lease, response: StoredResponse, now: float) -> None:
    """Appends the items of an ended response to its conversation and ends the lease."""
    assert response.status not in LIVE
    kept = response.status in KEPT
    _release(db, lease, (*response.input, *response.output) if kept else (), now)


def free_all(db: Database, server_id: str) -> None:
    """Ends all leases of a dead server."""
    db.execute("UPDATE conversations SET lease = NULL, server_id = NULL WHERE server_id = ?", (server_id,))
