"""Data types of batches, and the statements that read or write a single batch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from chorale.errors import NotFoundError
from chorale.store.database.sql import Database
from chorale.store.jobs import WAITING, owned
from chorale.store.responses import to_json

BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
LIVE = ("validating", "in_progress", "finalizing", "cancelling")  # every other status is final
_TIMES = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip
COLUMNS = (
    "seq, id, owner, status, created, expires, input_file_id, body, num_lines, num_completed, num_failed,"
    " attempts, input_tokens, cached_tokens, output_tokens, reasoning_tokens"
)


class BatchNotFoundError(NotFoundError, code="batch_not_found"): ...


@dataclass(frozen=True, slots=True)
class Tokens:
    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def to_object(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """``body``: fields that no query uses: ``endpoint``, ``completion_window``, ``metadata``, ``model``,
    ``errors``, ``output_file_id``, ``error_file_id``, ``output_seconds`` and the time of each status."""

    id: str
    owner: bytes  # hash of the API key, or empty; other keys cannot see it
    status: str
    created: float
    expires: float
    input_file_id: str
    body: dict[str, Any]
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    attempts: int = 0  # number of servers that died running the batch since its last record
    tokens: Tokens = Tokens()

    @property
    def num_done(self) -> int:
        return self.num_completed + self.num_failed

    @property
    def endpoint(self) -> str:
        return str(self.body["endpoint"])

    def to_object(self) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": body.get("model"),
            "errors": body.get("errors"),
            "input_file_id": self.input_file_id,
            "completion_window": body["completion_window"],
            "status": self.status,
            "output_file_id": body.get("output_file_id"),
            "error_file_id": body.get("error_file_id"),
            "created_at": int(self.created),
            "expires_at": int(self.expires),
            **{name: body.get(name) for name in _TIMES},
            "request_counts": {
                "total": self.num_lines,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "usage": self.tokens.to_object(),
            "metadata": body.get("metadata"),
        }


@dataclass(frozen=True, slots=True)
class Result:
    """The record of a line. ``data``: JSON without a line end, compressed with zlib."""

    line: int  # line number, from 1
    completed: bool  # whether the request succeeded
    data: bytes
    tokens: Tokens = Tokens()


def find_batch(db: Database, batch_id: str, owner: bytes) -> tuple[int, StoredBatch]:
    """Returns (``seq``, batch). Raises ``BatchNotFoundError``."""
    row = None
    if BATCH_ID.fullmatch(batch_id):
        query = f"SELECT {COLUMNS} FROM batches WHERE id = ? AND owner = ?"
        row = db.execute(query, (batch_id, owner)).fetchone()
    if row is None:
        raise BatchNotFoundError(f"no batch with id {batch_id[:128]!r}", param="batch_id")
    return int(row[0]), to_batch(row)


def owned_batch(db: Database, batch_id: str, server_id: str) -> tuple[int, StoredBatch] | None:
    """Returns (``seq``, batch), or None if the server does not own it."""
    row = owned(db, "batches", COLUMNS, batch_id, server_id)
    return None if row is None else (int(row[0]), to_batch(row))


def to_batch(row: tuple[Any, ...]) -> StoredBatch:
    _, batch_id, owner, status, created, expires, input_file_id, body = row[:8]
    lines, completed, failed, attempts = row[8:12]
    return StoredBatch(
        batch_id, bytes(owner), status, created, expires, input_file_id, json.loads(bytes(body)),
        int(lines), int(completed), int(failed), int(attempts), Tokens(*map(int, row[12:])),
    )  # fmt: skip


def change_status(db: Database, seq: int, batch: StoredBatch, status: str, now: float, **more: Any) -> None:
    """Writes a status, its time, and further keys of the body."""
    body = {**batch.body, f"{status}_at": int(now), **more}
    db.execute("UPDATE batches SET status = ?, body = ? WHERE seq = ?", (status, to_json(body), seq))


def release_batches(db: Database, server_id: str, num_attempts: int = 1) -> None:
    """Releases a server's batches, so that other servers can claim them.

    ``num_attempts``: 1 for a dead server, so that a batch that crashes every server is not retried forever.
    """
    db.execute(
        "UPDATE batches SET server_id = ?, attempts = attempts + ? WHERE server_id = ?",
        (WAITING, num_attempts, server_id),
    )
