"""Completions: stored chat completions, which share the table and the bounds of responses.

A row's body contains the completion sent to the client and the messages of its request; the row has no items.
Completion ids differ in form from response ids, so the two cannot be confused.
"""

from __future__ import annotations

import json
import re
from typing import Any

from chorale.store.access import Rows, reads, writes
from chorale.store.database.sql import Database, Paged, read_page
from chorale.store.protocol import CompletionFilter, StoredCompletion, StoredResponse
from chorale.store.responses import delete_response, find_response, insert_response, to_json

COMPLETION_ID = re.compile(r"chatcmpl-[0-9a-f]{32}")
_BATCH = 64  # rows per query
_ALSO = " AND substr(id, 1, 9) = 'chatcmpl-' AND used >= ?"


class Completions(Rows):
    """Stored chat completions."""

    @writes
    def put(self, db: Database, made: StoredCompletion, owner: bytes) -> None:
        """Stores a completion durably."""
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
        """Replaces the metadata. Returns None if the completion does not exist."""
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
        """Deletes a completion. Returns whether it existed."""
        if not COMPLETION_ID.fullmatch(completion_id):
            return False
        return delete_response(db, completion_id, owner, self._access.oldest())

    @reads
    def page(
        self, db: Database, owner: bytes, wanted: CompletionFilter
    ) -> tuple[list[dict[str, Any]], bool] | None:
        """Returns (completions, whether more follow), or None if ``wanted.after`` does not exist."""
        found: list[dict[str, Any]] = []
        after, has_more = wanted.after, True
        while has_more and len(found) <= wanted.limit:
            rows = read_page(
                db, Paged("responses"), owner, "id, body", after, _BATCH, wanted.newest_first, _ALSO,
                [self._access.oldest()],
            )  # fmt: skip
            if rows is None:
                return None
            has_more = rows[1]
            for completion_id, body in rows[0]:
                after = completion_id
                completion = json.loads(body)["completion"]
                if wanted.takes(completion):
                    found.append(completion)
        return found[: wanted.limit], len(found) > wanted.limit

    def _find(self, db: Database, completion_id: str, owner: bytes) -> StoredCompletion | None:
        if not COMPLETION_ID.fullmatch(completion_id):
            return None
        row = find_response(db, completion_id, owner, self._access.oldest())
        return None if row is None else StoredCompletion(row.body["completion"], row.body["messages"])
