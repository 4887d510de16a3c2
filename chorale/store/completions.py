"""Completions: stored chat completions, which share the table and the bounds of responses.

A row's body contains the completion sent to the client and the messages of its request; the row has no items.
Completion ids differ in form from response ids, so the two cannot be confused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from chorale.errors import NotFoundError
from chorale.store.access import Rows, reads, writes
from chorale.store.database.sql import Database, Page, Paged, read_page
from chorale.store.protocol import StoredCompletion, StoredResponse
from chorale.store.responses import delete_response, find_response, insert_response, to_json

COMPLETION_ID = re.compile(r"chatcmpl-[0-9a-f]{32}")
_BATCH = 64  # rows per query
_ALSO = " AND substr(id, 1, 9) = 'chatcmpl-' AND used >= ?"


class Completions(Rows):
    """Stored chat completions. Methods with an id raise ``NotFoundError`` if the owner has none with it."""

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
    def get(self, db: Database, completion_id: str, owner: bytes) -> StoredCompletion:
        return self._find(db, completion_id, owner)

    @writes
    def update(
        self, db: Database, completion_id: str, owner: bytes, metadata: dict[str, str]
    ) -> StoredCompletion:
        """Replaces the metadata."""
        found = self._find(db, completion_id, owner)
        changed = StoredCompletion({**found.completion, "metadata": metadata}, found.messages)
        body = to_json({"completion": changed.completion, "messages": changed.messages})
        db.execute(
            "UPDATE responses SET num_bytes = num_bytes + ? - length(body), body = ?"
            " WHERE id = ? AND owner = ?",
            (len(body), body, completion_id, owner),
        )
        return changed

    @writes
    def delete(self, db: Database, completion_id: str, owner: bytes) -> None:
        self._find(db, completion_id, owner)
        delete_response(db, completion_id, owner, self._access.oldest())

    @reads
    def page(
        self, db: Database, owner: bytes, page: Page, metadata: Mapping[str, str], model: str | None = None
    ) -> tuple[list[dict[str, Any]], bool]:
        """Returns (completions with this model and metadata, whether more follow).

        Raises as ``read_page``.
        """
        found: list[dict[str, Any]] = []
        part, has_more = replace(page, limit=_BATCH), True
        while has_more and len(found) <= page.limit:
            rows, has_more = read_page(
                db, Paged("responses"), owner, "id, body", part, _ALSO, [self._access.oldest()]
            )
            for completion_id, body in rows:
                part = replace(part, after=completion_id)
                completion = json.loads(body)["completion"]
                labels = (completion.get("metadata") or {}).items()
                if model in (None, completion["model"]) and metadata.items() <= labels:
                    found.append(completion)
        return found[: page.limit], len(found) > page.limit

    def _find(self, db: Database, completion_id: str, owner: bytes) -> StoredCompletion:
        is_id = COMPLETION_ID.fullmatch(completion_id) is not None
        row = find_response(db, completion_id, owner, self._access.oldest()) if is_id else None
        if row is None:
            message = (
                f"no chat completion with id {completion_id[:128]!r} is stored; send store: true to store one"
            )
            raise NotFoundError(message, param="completion_id")
        return StoredCompletion(row.body["completion"], row.body["messages"])
