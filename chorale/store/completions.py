"""Completions: stored chat completions, in the table and within the bounds of responses.

A row's body contains the completion as it was sent and the messages of its request. It has no items. Its id
differs in form from a response's, so the two cannot be confused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from chorale.store.access import Access
from chorale.store.database.sql import Database
from chorale.store.protocol import CompletionFilter, StoredCompletion, StoredResponse
from chorale.store.responses import delete_response, find_response, insert_response, to_json

COMPLETION_ID = re.compile(r"chatcmpl-[0-9a-f]{32}")
_BATCH = 64  # rows read at a time for a page


class Completions:
    """Stored chat completions."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def put(self, made: StoredCompletion, owner: bytes) -> None:
        """Stores it durably."""
        row = StoredResponse(
            id=made.id,
            owner=owner,
            previous_id=None,
            created=float(made.completion["created"]),
            status="completed",
            body={"completion": made.completion, "messages": made.messages},
            input=(),
            output=(),
        )

        def job(db: Database) -> None:
            insert_response(db, row, self._access.clock())
            self._access.evict(db)

        await self._access.write(job)

    async def get(self, completion_id: str, owner: bytes) -> StoredCompletion | None:
        if not COMPLETION_ID.fullmatch(completion_id):
            return None
        return await self._access.read(lambda db: self._find(db, completion_id, owner))

    async def update(
        self, completion_id: str, owner: bytes, metadata: dict[str, str]
    ) -> StoredCompletion | None:
        """Replaces the metadata. Returns None if it does not exist."""
        if not COMPLETION_ID.fullmatch(completion_id):
            return None

        def job(db: Database) -> StoredCompletion | None:
            found = self._find(db, completion_id, owner)
            if found is None:
                return None
            changed = StoredCompletion({**found.completion, "metadata": metadata}, found.messages)
            body = to_json({"completion": changed.completion, "messages": changed.messages})
            db.execute(
                "UPDATE responses SET num_bytes = num_bytes + ? - length(body), body = ?"
                " WHERE id = ? AND owner = ?",
                (len(body), body, completion_id, owner),
            )
            return changed

        return await self._access.write(job)

    async def delete(self, completion_id: str, owner: bytes) -> bool:
        """Deletes it. Returns whether it existed."""
        if not COMPLETION_ID.fullmatch(completion_id):
            return False
        return await self._access.write(
            lambda db: delete_response(db, completion_id, owner, self._access.oldest())
        )

    async def page(self, owner: bytes, wanted: CompletionFilter) -> tuple[list[dict[str, Any]], bool] | None:
        """Returns (completions, whether more follow), or None if ``wanted.after`` does not exist."""
        return await self._access.read(lambda db: self._page(db, owner, wanted))

    # ------------------------------------------------------------------ on the threads

    def _find(self, db: Database, completion_id: str, owner: bytes) -> StoredCompletion | None:
        row = find_response(db, completion_id, owner, self._access.oldest())
        return None if row is None else StoredCompletion(row.body["completion"], row.body["messages"])

    def _page(
        self, db: Database, owner: bytes, wanted: CompletionFilter
    ) -> tuple[list[dict[str, Any]], bool] | None:
        start = -1 if not wanted.newest_first else 2**62
        if wanted.after is not None:
            row = db.execute(
                "SELECT seq FROM responses WHERE id = ? AND owner = ?", (wanted.after, owner)
            ).fetchone()
            if row is None:
                return None
            start = int(row[0])
        found: list[dict[str, Any]] = []
        for body in _bodies(db, owner, self._access.oldest(), wanted.newest_first, start):
            completion = json.loads(body)["completion"]
            if wanted.takes(completion):
                found.append(completion)
            if len(found) > wanted.limit:
                break
        return found[: wanted.limit], len(found) > wanted.limit


def _bodies(db: Database, owner: bytes, oldest: float, newest_first: bool, start: int) -> Iterator[bytes]:
    """Yields the bodies of an owner's completions after the row ``start``, read in batches."""
    beyond, order = ("<", "DESC") if newest_first else (">", "ASC")
    query = (
        "SELECT seq, body FROM responses WHERE owner = ? AND substr(id, 1, 9) = 'chatcmpl-' AND used >= ?"
        f" AND seq {beyond} ? ORDER BY seq {order} LIMIT {_BATCH}"
    )
    while rows := db.execute(query, (owner, oldest, start)).fetchall():
        yield from (body for _, body in rows)
        start = rows[-1][0]
