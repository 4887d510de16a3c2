"""Completions: stored chat completions, in the table and within the bounds of responses.

A row's body contains the completion as it was sent and the messages of its request. It has no items. Its id
differs in form from a response's, so the two cannot be confused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from chorale.store.access import Rows, reads, writes
from chorale.store.database.sql import Database, page_start
from chorale.store.protocol import CompletionFilter, StoredCompletion, StoredResponse
from chorale.store.responses import delete_response, find_response, insert_response, to_json

COMPLETION_ID = re.compile(r"chatcmpl-[0-9a-f]{32}")
_BATCH = 64  # rows read at a time for a page


class Completions(Rows):
    """Stored chat completions."""

    @writes
    def put(self, db: Database, made: StoredCompletion, owner: bytes) -> None:
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
        insert_response(db, row, self.now)
        self._access.evict(db)

    @reads
    def get(self, db: Database, completion_id: str, owner: bytes) -> StoredCompletion | None:
        return self._find(db, completion_id, owner)

    @writes
    def update(
        self, db: Database, completion_id: str, owner: bytes, metadata: dict[str, str]
    ) -> StoredCompletion | None:
        """Replaces the metadata. Returns None if it does not exist."""
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

    @writes
    def delete(self, db: Database, completion_id: str, owner: bytes) -> bool:
        """Deletes it. Returns whether it existed."""
        if not COMPLETION_ID.fullmatch(completion_id):
            return False
        return delete_response(db, completion_id, owner, self._access.oldest())

    @reads
    def page(
        self, db: Database, owner: bytes, wanted: CompletionFilter
    ) -> tuple[list[dict[str, Any]], bool] | None:
        """Returns (completions, whether more follow), or None if ``wanted.after`` does not exist."""
        start = page_start(db, "responses", owner, wanted.after, wanted.newest_first)
        if start is None:
            return None
        found: list[dict[str, Any]] = []
        for body in _bodies(db, owner, self._access.oldest(), wanted.newest_first, start):
            completion = json.loads(body)["completion"]
            if wanted.takes(completion):
                found.append(completion)
            if len(found) > wanted.limit:
                break
        return found[: wanted.limit], len(found) > wanted.limit

    def _find(self, db: Database, completion_id: str, owner: bytes) -> StoredCompletion | None:
        if not COMPLETION_ID.fullmatch(completion_id):
            return None
        row = find_response(db, completion_id, owner, self._access.oldest())
        return None if row is None else StoredCompletion(row.body["completion"], row.body["messages"])


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
