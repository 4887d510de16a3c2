"""Conversations: conversations in the store."""

from __future__ import annotations

from collections.abc import Sequence

from chorale.ids import new_id
from chorale.store import conversation_rows
from chorale.store.access import Rows, reads, writes
from chorale.store.database.sql import Database
from chorale.store.jobs import register
from chorale.store.protocol import CONVERSATION_ID, Conversation, ItemPage, Lease, StoredItem
from chorale.store.responses import load_conversation, no_conversation


class Conversations(Rows):
    """Raises ``ConversationNotFoundError`` for unknown ids, ``ConversationLockedError`` for leased ones."""

    @writes
    def create(
        self, db: Database, owner: bytes, metadata: dict[str, str], items: Sequence[StoredItem]
    ) -> Conversation:
        made = Conversation(new_id("conv"), owner, self.now, metadata)
        conversation_rows.insert_conversation(db, made, items, made.created)
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
        conversation_rows.set_metadata(db, seq, metadata, self.now)
        return Conversation(found.id, owner, found.created, metadata)

    @writes
    def delete(self, db: Database, conversation_id: str, owner: bytes) -> None:
        seq, _ = self._find(db, conversation_id, owner)
        db.execute("DELETE FROM conversations WHERE seq = ?", (seq,))

    @reads
    def history(self, db: Database, conversation_id: str, owner: bytes) -> list[StoredItem]:
        """Returns all items, oldest first. Raises ``ContextLengthError`` beyond any context window."""
        _check(conversation_id)
        return load_conversation(db, conversation_id, owner, self._access.oldest())

    @reads
    def page(
        self,
        db: Database,
        conversation_id: str,
        owner: bytes,
        *,
        after: str | None,
        limit: int,
        newest_first: bool,
    ) -> ItemPage:
        seq, _ = self._find(db, conversation_id, owner)
        return conversation_rows.load_page(db, seq, after=after, limit=limit, newest_first=newest_first)

    @reads
    def item(self, db: Database, conversation_id: str, owner: bytes, item_id: str) -> StoredItem | None:
        return conversation_rows.find_own_item(db, self._find(db, conversation_id, owner)[0], item_id)

    @writes
    def append(
        self, db: Database, conversation_id: str, owner: bytes, items: Sequence[StoredItem]
    ) -> list[StoredItem]:
        """Returns the items as stored; an id that is in use is replaced."""
        seq, _ = self._find(db, conversation_id, owner)
        conversation_rows.check_unleased(db, seq)
        added = conversation_rows.add_items(db, seq, items, self.now)
        self._access.evict(db)
        return added

    @writes
    def remove(self, db: Database, conversation_id: str, owner: bytes, item_id: str) -> Conversation | None:
        """Returns the conversation without the item, or None if the item is not in it."""
        seq, found = self._find(db, conversation_id, owner)
        conversation_rows.check_unleased(db, seq)
        return found if conversation_rows.remove_item(db, seq, item_id, self.now) else None

    @writes
    def take(self, db: Database, conversation_id: str, owner: bytes, server_id: str) -> Lease:
        """Takes the lease. Raises ``ConversationLockedError`` if another request has it."""
        seq, found = self._find(db, conversation_id, owner)
        register(db, server_id)
        return conversation_rows.take_lease(db, found, seq, new_id("lease"), server_id)

    @writes
    def release(self, db: Database, lease: Lease, items: Sequence[StoredItem] = ()) -> None:
        """Ends the lease after appending ``items``. A deleted conversation is not an error."""
        conversation_rows.release_lease(db, lease, items, self.now)

    def _find(self, db: Database, conversation_id: str, owner: bytes) -> tuple[int, Conversation]:
        _check(conversation_id)
        return conversation_rows.find(db, conversation_id, owner, self._access.oldest())


def _check(conversation_id: str) -> None:
    """Raises ``ConversationNotFoundError`` for malformed ids, without a query."""
    if not CONVERSATION_ID.fullmatch(conversation_id):
        raise no_conversation(conversation_id)
