"""Batches: batches in the store, each processed by one server process, and the records of their lines.

A batch waits until a server claims it. If this server stops or dies before the batch has ended, another one
continues. Every write of the owning server has ``server_id`` in its WHERE clause, so a server that was
declared dead can no longer write. The record of a line is a row of ``batch_results``, written once, in the
same transaction as the counts of the batch. When a batch ends, its records are written to files
(``chorale.jobs.work``), and the rows are deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chorale.errors import ConflictError, QueueFullError, RequestError
from chorale.store.access import Rows, reads, writes
from chorale.store.batch_rows import (
    COLUMNS,
    LIVE,
    Result,
    StoredBatch,
    change_status,
    find_batch,
    owned_batch,
    release_batches,
    to_batch,
)
from chorale.store.database.sql import Database, Page, Paged, read_page
from chorale.store.files import StoredFile, find_file, finish_upload, sizes
from chorale.store.jobs import WAITING, owned, take
from chorale.store.responses import to_json

MAX_ATTEMPTS = 10  # servers that may die in succession without recording a line
_DELETED = 500  # most rows that one write deletes
_SEQ = "SELECT seq FROM batches WHERE id = ?"
_DONE = "SELECT seq FROM batches WHERE ended IS NOT NULL AND has_results = 1 LIMIT 1"


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Number of live batches by status, of files and of their bytes, over all owners."""

    num_by_status: dict[str, int]
    num_files: int
    num_bytes: int


class Batches(Rows):
    """All batches. Methods for the owning server return None or False if it no longer owns the batch."""

    @writes
    def create(self, db: Database, batch: StoredBatch, served_model: str, max_live: int) -> None:
        """Adds a batch that waits for a server of ``served_model``.

        Raises ``FileNotFoundFault`` if its input does not exist, or ``QueueFullError`` if the owner has
        ``max_live`` live batches.
        """
        file = find_file(db, batch.input_file_id, batch.owner, self.now)
        if file.purpose != "batch":
            raise RequestError(
                f"input_file_id: {file.id} has the purpose {file.purpose!r}; upload it with purpose 'batch'",
                param="input_file_id",
                code="invalid_file_purpose",
            )
        row = db.execute("SELECT COUNT(*) FROM batches WHERE owner = ? AND ended IS NULL", (batch.owner,))
        if (num := int(row.fetchone()[0])) >= max_live:
            raise QueueFullError(
                f"{num} of your batches have not ended, and this server allows {max_live} for each API key "
                "(--batch-max-active)",
                code="batch_quota_exceeded",
                retry_after=60.0,
            )
        db.execute(
            "INSERT INTO batches (id, owner, status, created, expires, served_model, input_file_id, body,"
            " server_id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                batch.id, batch.owner, batch.status, batch.created, batch.expires, served_model,
                batch.input_file_id, to_json(batch.body), WAITING,
            ),
        )  # fmt: skip

    @reads
    def get(self, db: Database, batch_id: str, owner: bytes) -> StoredBatch:
        """Returns a batch. Raises ``BatchNotFoundError``."""
        return find_batch(db, batch_id, owner)[1]

    @reads
    def page(self, db: Database, owner: bytes, page: Page) -> tuple[list[StoredBatch], bool]:
        """Returns (batches, whether more follow). Raises as ``read_page``."""
        rows, has_more = read_page(db, Paged("batches"), owner, COLUMNS, page)
        return list(map(to_batch, rows)), has_more

    @writes
    def cancel(self, db: Database, batch_id: str, owner: bytes) -> StoredBatch:
        """Marks a batch as cancelling, for its server to cancel it.

        Raises ``BatchNotFoundError``, or ``ConflictError`` if the batch is finalizing or has ended.
        """
        seq, batch = find_batch(db, batch_id, owner)
        if batch.status == "cancelling":
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise ConflictError(f"a batch with status {batch.status!r} cannot be cancelled", param="batch_id")
        change_status(db, seq, batch, "cancelling", self.now)
        return find_batch(db, batch_id, owner)[1]

    # ------------------------------------------------------------------ the owning server

    @reads
    def any_waiting(self, db: Database, served_model: str) -> bool:
        """Returns whether a batch is waiting. Lets idle servers avoid ``claim``, which is a write."""
        query = "SELECT 1 FROM batches WHERE server_id = ? AND served_model = ? LIMIT 1"
        return db.execute(query, (WAITING, served_model)).fetchone() is not None

    @writes
    def claim(self, db: Database, server_id: str, served_model: str) -> StoredBatch | None:
        """Claims the oldest waiting batch of the owners with the fewest running batches, and returns it."""
        row = db.execute(
            "SELECT id FROM batches WHERE server_id = ? AND served_model = ? ORDER BY"
            " (SELECT COUNT(*) FROM batches AS other WHERE other.owner = batches.owner"
            " AND other.server_id IS NOT NULL AND other.server_id <> ?), seq LIMIT 1",
            (WAITING, served_model, WAITING),
        ).fetchone()
        if row is None or not take(db, "batches", row[0], server_id):
            return None
        return to_batch(owned(db, "batches", COLUMNS, row[0], server_id))

    @writes
    def delete(self, db: Database, batch_id: str, server_id: str) -> None:
        """Deletes a batch of this server with its records."""
        db.execute("DELETE FROM batches WHERE id = ? AND server_id = ?", (batch_id, server_id))

    @writes
    def release(self, db: Database, server_id: str) -> None:
        """Releases the server's batches. Another server, or this one after a restart, can claim them."""
        release_batches(db, server_id, 0)

    @reads
    def owned(self, db: Database, batch_id: str, server_id: str) -> StoredBatch | None:
        found = owned_batch(db, batch_id, server_id)
        return None if found is None else found[1]

    @writes
    def begin(self, db: Database, batch_id: str, server_id: str, num_lines: int, model: str | None) -> bool:
        """Ends the validation: the batch is in progress, unless it was cancelled."""
        found = owned_batch(db, batch_id, server_id)
        if found is None:
            return False
        seq, batch = found
        db.execute("UPDATE batches SET num_lines = ? WHERE seq = ?", (num_lines, seq))
        if batch.status == "validating":
            named = {} if model is None else {"model": model}
            change_status(db, seq, batch, "in_progress", self.now, **named)
        return True

    @reads
    def answered(self, db: Database, batch_id: str) -> set[int]:
        """Returns the numbers of the lines that have a record."""
        rows = db.execute(f"SELECT line FROM batch_results WHERE batch_seq = ({_SEQ})", (batch_id,))
        return {int(row[0]) for row in rows.fetchall()}

    @writes
    def record(self, db: Database, batch_id: str, server_id: str, results: Sequence[Result]) -> str | None:
        """Stores records of lines that have none yet. Returns the status of the batch."""
        row = owned(db, "batches", "seq, status", batch_id, server_id)
        if row is None:
            return None
        seq, status = row
        new: list[Result] = []
        for result in results:
            added = db.execute(
                "INSERT INTO batch_results (batch_seq, line, completed, data) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (batch_seq, line) DO NOTHING",
                (seq, result.line, int(result.completed), result.data),
            )
            if added.rowcount:
                new.append(result)
        num_completed = sum(result.completed for result in new)
        tokens = [
            sum(getattr(result.tokens, name) for result in new)
            for name in ("input", "cached", "output", "reasoning")
        ]
        db.execute(
            "UPDATE batches SET attempts = 0, num_completed = num_completed + ?, num_failed = num_failed + ?,"
            " input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?,"
            " output_tokens = output_tokens + ?, reasoning_tokens = reasoning_tokens + ? WHERE seq = ?",
            (num_completed, len(new) - num_completed, *tokens, seq),
        )
        return str(status)

    @reads
    def results(
        self, db: Database, batch_id: str, completed: bool | None, after: int, limit: int
    ) -> list[tuple[int, bytes]]:
        """Returns (line, data) of records after line ``after``. ``completed`` None: all records."""
        rows = db.execute(
            f"SELECT line, data FROM batch_results WHERE batch_seq = ({_SEQ})"
            " AND completed = COALESCE(?, completed) AND line > ? ORDER BY line LIMIT ?",
            (batch_id, None if completed is None else int(completed), after, limit),
        )
        return [(int(line), bytes(data)) for line, data in rows.fetchall()]

    @writes
    def finalize(self, db: Database, batch_id: str, server_id: str) -> bool:
        """Marks that the files are being written: the batch can no longer be cancelled."""
        found = owned_batch(db, batch_id, server_id)
        if found is None:
            return False
        if found[1].status == "in_progress":
            change_status(db, *found, "finalizing", self.now)
        return True

    @writes
    def end(
        self,
        db: Database,
        batch_id: str,
        server_id: str,
        status: str,
        *,
        output: StoredFile | None = None,
        errors: StoredFile | None = None,
        num_failed: int = 0,
        faults: Sequence[dict[str, Any]] = (),
    ) -> bool:
        """Ends the batch with its files, in one transaction. ``num_failed``: lines without a record."""
        found = owned_batch(db, batch_id, server_id)
        if found is None:
            return False
        seq, batch = found
        more: dict[str, Any] = {"errors": {"object": "list", "data": list(faults)}} if faults else {}
        for name, file in (("output_file_id", output), ("error_file_id", errors)):
            if file is not None:
                finish_upload(db, file, server_id)
                more[name] = file.id
        change_status(db, seq, batch, status, self.now, **more)
        db.execute(
            "UPDATE batches SET server_id = NULL, ended = ?, num_failed = num_failed + ? WHERE seq = ?",
            (self.now, num_failed, seq),
        )
        return True

    # ------------------------------------------------------------------ housekeeping

    async def sweep(self, ttl: float) -> bool:
        """Deletes some records of ended batches, or some batches that ended more than ``ttl`` seconds ago.

        Returns whether there was anything to delete.
        """
        oldest = self.now - ttl
        found = await self._is_due(oldest)
        if found:
            await self._delete_some(oldest)
        return found

    @reads
    def _is_due(self, db: Database, oldest: float) -> bool:
        query = f"SELECT EXISTS ({_DONE}) OR EXISTS (SELECT 1 FROM batches WHERE ended < ?)"
        return bool(db.execute(query, (oldest,)).fetchone()[0])

    @writes
    def _delete_some(self, db: Database, oldest: float) -> None:
        if (done := db.execute(_DONE).fetchone()) is not None:
            lines = "SELECT batch_seq, line FROM batch_results WHERE batch_seq = ? LIMIT ?"
            rows = db.execute(lines, (done[0], _DELETED)).fetchall()
            db.executemany("DELETE FROM batch_results WHERE batch_seq = ? AND line = ?", rows)
            if len(rows) < _DELETED:
                db.execute("UPDATE batches SET has_results = 0 WHERE seq = ?", done)
        else:  # a batch is deleted after its records
            old = f"SELECT seq FROM batches WHERE ended < ? LIMIT {_DELETED}"
            rows = db.execute(old, (oldest,)).fetchall()
            db.executemany("DELETE FROM batches WHERE seq = ?", rows)

    @reads
    def stats(self, db: Database) -> BatchStats:
        query = "SELECT status, COUNT(*) FROM batches WHERE ended IS NULL GROUP BY status"
        rows = db.execute(query).fetchall()
        return BatchStats(dict.fromkeys(LIVE, 0) | dict(rows), *sizes(db))
