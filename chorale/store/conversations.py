"""Conversations: conversations in the store."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from chorale.ids import new_id
from chorale.store import conversation_rows
from chorale.store.access import Access
from chorale.store.database.sql import Database
from chorale.store.protocol import CONVERSATION_ID, Conversation, ItemPage, Lease, StoredItem
from chorale.store.responses import load_conversation, no_conversation
from chorale.store.servers import register


class Conversations:
    """Raises ``ConversationNotFoundError`` for unknown ids, ``ConversationLockedError`` for leased ones."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def create(
        self, owner: bytes, metadata: dict[str, str], items: Sequence[StoredItem]
    ) -> Conversation:
        now = self._access.clock()
        made = Conversation(new_id("conv"), owner, now, metadata)

        def job(db: Database) -> None:
            conversation_rows.insert_conversation(db, made, items, now)
            self._access.evict(db)

        await self._access.write(job)
        return made

    async def get(self, conversation_id: str, owner: bytes) -> Conversation:
        _check(conversation_id)
        return (await self._access.read(partial(self._find, conversation_id, owner)))[1]

    async def update(self, conversation_id: str, owner: bytes, metadata: dict[str, str]) -> Conversation:
        _check(conversation_id)

        def job(db: Database) -> Conversation:
            seq, found = self._find(conversation_id, owner, db)
            conversation_rows.set_metadata(db, seq, metadata, self._access.clock())
            return Conversation(found.id, owner, found.created, metadata)

        return await self._access.write(job)

    async def delete(self, conversation_id: str, owner: bytes) -> None:
        _check(conversation_id)

        def job(db: Database) -> None:
            seq, _ = self._find(conversation_id, owner, db)
            db.execute("DELETE FROM conversations WHERE seq = ?", (seq,))

        await self._access.write(job)

    async def history(self, conversation_id: str, owner: bytes) -> list[StoredItem]:
        """Returns all items, oldest first. Raises ``ContextLengthError`` beyond any context window."""
        _check(conversation_id)
        return await self._access.read(
            lambda db: load_conversation(db, conversation_id, owner, self._access.oldest())
        )

    async def page(
        self, conversation_id: str, owner: bytes, *, after: str | None, limit: int, newest_first: bool
    ) -> ItemPage:
        _check(conversation_id)

        def job(db: Database) -> ItemPage:
            seq, _ = self._find(conversation_id, owner, db)
            return conversation_rows.load_page(db, seq, after=after, limit=limit, newest_first=newest_first)

        return await self._access.read(job)

    async def item(self, conversation_id: str, owner: bytes, item_id: str) -> StoredItem | None:
        _check(conversation_id)
        return await self._access.read(
            lambda db: conversation_rows.find_own_item(db, self._find(conversation_id, owner, db)[0], item_id)
        )

    async def append(
        self, conversation_id: str, owner: bytes, items: Sequence[StoredItem]
    ) -> list[StoredItem]:
        """Returns the items as stored; an id that is in use is replaced."""
        _check(conversation_id)

        def job(db: Database) -> list[StoredItem]:
            seq, _ = self._find(conversation_id, owner, db)
            conversation_rows.check_unleased(db, seq)
            added = conversation_rows.add_items(db, seq, items, self._access.clock())
            self._access.evict(db)
            return added

        return await self._access.write(job)

    async def remove(self, conversation_id: str, owner: bytes, item_id: str) -> Conversation | None:
        """Returns the conversation without the item, or None if the item is not in it."""
        _check(conversation_id)

        def job(db: Database) -> Conversation | None:
            seq, found = self._find(conversation_id, owner, db)
            conversation_rows.check_unleased(db, seq)
            return found if conversation_rows.remove_item(db, seq, item_id, self._access.clock()) else None

        return await self._access.write(job)

    async def take(self, conversation_id: str, owner: bytes, server_id: str) -> Lease:
        _check(conversation_id)

        def job(db: Database) -> Lease:
            seq, found = self._find(conversation_id, owner, db)
            register(db, server_id)
            return conversation_rows.take_lease(db, found, seq, new_id("lease"), server_id)

        return await self._access.write(job)

    async def release(self, lease: Lease, items: Sequence[StoredItem] = ()) -> None:
        """Ends the lease after appending ``items``. A deleted conversation is not an error."""
        await self._access.write(
            lambda db: conversation_rows.release_lease(db, lease, items, self._access.clock())
        )

    def _find(self, conversation_id: str, owner: bytes, db: Database) -> tuple[int, Conversation]:
        return conversation_rows.find(db, conversation_id, owner, self._access.oldest())


def _check(conversation_id: str) -> None:
    """Raises ``ConversationNotFoundError`` for malformed ids, without a query."""
    if not CONVERSATION_ID.fullmatch(conversation_id):
        raise no_conversation(conversation_id)
