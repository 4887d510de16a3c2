"""Batches: batches in the store, each worked on by one server process, and the answers to their lines.

A batch waits for a server, which claims it and works on it until it has ended, stops, or dies; then another
server continues. Every write of the working server requires ``server_id`` in its WHERE clause, so a server
that was taken for dead cannot add anything any more. The record of a line is a row of ``batch_results``: it
is durable with the counts of the batch in the same transaction, and exists once. When a batch ends, its
records become files (``chorale.jobs.runner``), and the rows are deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from chorale.errors import ConflictError, QueueFullError, RequestError
from chorale.store.access import Access
from chorale.store.batch_rows import (
    BATCH_ID,
    COLUMNS,
    LIVE,
    Result,
    StoredBatch,
    change_status,
    find_batch,
    load_batch,
    no_batch,
    owned_batch,
    release_batches,
)
from chorale.store.database.sql import Database
from chorale.store.files import StoredFile, find_file, finish_upload, sizes
from chorale.store.responses import to_json
from chorale.store.servers import WAITING, register

MAX_ATTEMPTS = 10  # servers that may die one after the other without a line being answered
_DELETED = 500  # rows deleted by one write at most


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Live batches by status, files, and their bytes, of all owners."""

    num_by_status: dict[str, int]
    num_files: int
    num_bytes: int


class Batches:
    """All batches. Methods of the working server return None or False once it works on the batch no more."""

    def __init__(self, access: Access) -> None:
        self._access = access

    @property
    def now(self) -> float:
        return self._access.clock()

    async def create(self, batch: StoredBatch, served_model: str, max_live: int) -> None:
        """Adds a batch that waits for a server of ``served_model``.

        Raises ``FileNotFoundFault`` for its input, or ``QueueFullError`` if the owner has ``max_live`` live
        batches.
        """
        await self._access.write(partial(self._create, batch, served_model, max_live))

    async def get(self, batch_id: str, owner: bytes) -> StoredBatch:
        """Raises ``BatchNotFoundError``."""
        if not BATCH_ID.fullmatch(batch_id):
            raise no_batch(batch_id)
        return await self._access.read(lambda db: find_batch(db, batch_id, owner))

    async def page(
        self, owner: bytes, after: str | None, limit: int
    ) -> tuple[list[StoredBatch], bool] | None:
        """Returns (batches, newest first; whether more follow), or None if ``after`` does not exist."""
        return await self._access.read(partial(_page, owner, after, limit))

    async def cancel(self, batch_id: str, owner: bytes) -> StoredBatch:
        """Asks its server to cancel it.

        Raises ``BatchNotFoundError``, or ``ConflictError`` if it has ended.
        """
        if not BATCH_ID.fullmatch(batch_id):
            raise no_batch(batch_id)
        return await self._access.write(partial(self._cancel, batch_id, owner))

    # ------------------------------------------------------------------ the working server

    async def claim(self, server_id: str, served_model: str) -> str | None:
        """Takes a waiting batch: that of an owner with the fewest running ones, the oldest of these."""
        return await self._access.write(partial(_claim, server_id, served_model))

    async def any_waiting(self, served_model: str) -> bool:
        """Returns whether ``claim`` may find one. Reads only, so that idle servers write nothing."""
        query = "SELECT 1 FROM batches WHERE server_id = ? AND served_model = ? LIMIT 1"
        row = await self._access.read(lambda db: db.execute(query, (WAITING, served_model)).fetchone())
        return row is not None

    async def release(self, server_id: str) -> None:
        """Puts the server's batches back for another server, or the next start of this one."""
        await self._access.write(lambda db: release_batches(db, server_id, 0))

    async def owned(self, batch_id: str, server_id: str) -> StoredBatch | None:
        found = await self._access.read(lambda db: owned_batch(db, batch_id, server_id))
        return None if found is None else found[1]

    async def begin(self, batch_id: str, server_id: str, num_lines: int, model: str | None) -> bool:
        """Ends the validation: the batch is in progress, unless it was cancelled."""
        return await self._access.write(partial(self._begin, batch_id, server_id, num_lines, model))

    async def answered(self, batch_id: str) -> set[int]:
        """Returns the numbers of the lines that have a record."""
        return await self._access.read(partial(_answered, batch_id))

    async def record(self, batch_id: str, server_id: str, results: Sequence[Result]) -> str | None:
        """Stores records, each once. Returns the status of the batch."""
        return await self._access.write(partial(_record, batch_id, server_id, results))

    async def results(
        self, batch_id: str, completed: bool, after: int, limit: int
    ) -> list[tuple[int, bytes]]:
        """Returns (line, data) of records after a line, in the order of the lines."""
        return await self._access.read(partial(_results, batch_id, completed, after, limit))

    async def finalize(self, batch_id: str, server_id: str) -> bool:
        """The files are about to be written; the batch cannot be cancelled any more."""
        return await self._access.write(partial(self._finalize, batch_id, server_id))

    async def end(
        self,
        batch_id: str,
        server_id: str,
        status: str,
        *,
        output: StoredFile | None = None,
        errors: StoredFile | None = None,
        num_failed: int = 0,
        faults: Sequence[dict[str, Any]] = (),
    ) -> bool:
        """Ends the batch with its files, in one transaction. ``num_failed``: lines that were never sent."""
        return await self._access.write(
            partial(self._end, batch_id, server_id, status, output, errors, num_failed, faults)
        )

    # ------------------------------------------------------------------ housekeeping

    async def sweep(self, ttl: float) -> bool:
        """Deletes records of ended batches, and batches that ended ``ttl`` seconds ago, some at a time.

        Returns whether there were any.
        """
        found = await self._access.read(partial(_to_sweep, self.now - ttl))
        if found:
            await self._access.write(partial(_sweep, self.now - ttl))
        return found

    async def stats(self) -> BatchStats:
        return await self._access.read(_stats)

    # ------------------------------------------------------------------ on the threads

    def _create(self, batch: StoredBatch, served_model: str, max_live: int, db: Database) -> None:
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

    def _cancel(self, batch_id: str, owner: bytes, db: Database) -> StoredBatch:
        batch = find_batch(db, batch_id, owner)
        if batch.status == "cancelling":
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise ConflictError(f"a batch with status {batch.status!r} cannot be cancelled", param="batch_id")
        row = db.execute("SELECT seq FROM batches WHERE id = ?", (batch_id,)).fetchone()
        change_status(db, row[0], batch, "cancelling", self.now)
        return find_batch(db, batch_id, owner)

    def _begin(self, batch_id: str, server_id: str, num_lines: int, model: str | None, db: Database) -> bool:
        found = owned_batch(db, batch_id, server_id)
        if found is None:
            return False
        seq, batch = found
        db.execute("UPDATE batches SET num_lines = ? WHERE seq = ?", (num_lines, seq))
        if batch.status == "validating":
            named = {} if model is None else {"model": model}
            change_status(db, seq, batch, "in_progress", self.now, **named)
        return True

    def _finalize(self, batch_id: str, server_id: str, db: Database) -> bool:
        found = owned_batch(db, batch_id, server_id)
        if found is None:
            return False
        if found[1].status == "in_progress":
            change_status(db, *found, "finalizing", self.now)
        return True

    def _end(
        self,
        batch_id: str,
        server_id: str,
        status: str,
        output: StoredFile | None,
        errors: StoredFile | None,
        num_failed: int,
        faults: Sequence[dict[str, Any]],
        db: Database,
    ) -> bool:
        found = owned_batch(db, batch_id, server_id)
        if found is None:
            return False
        seq, batch = found
        more: dict[str, Any] = {"errors": {"object": "list", "data": list(faults)}} if faults else {}
        for name, file in (("output_file_id", output), ("error_file_id", errors)):
            if file is not None:
                finish_upload(file, server_id, db)
                more[name] = file.id
        change_status(db, seq, batch, status, self.now, **more)
        db.execute(
            "UPDATE batches SET server_id = NULL, ended = ?, num_failed = num_failed + ? WHERE seq = ?",
            (self.now, num_failed, seq),
        )
        return True


# --------------------------------------------------------------------------- statements


def _page(owner: bytes, after: str | None, limit: int, db: Database) -> tuple[list[StoredBatch], bool] | None:
    start = 2**62
    if after is not None:
        row = db.execute("SELECT seq FROM batches WHERE id = ? AND owner = ?", (after, owner)).fetchone()
        if row is None:
            return None
        start = int(row[0])
    rows = db.execute(
        f"SELECT {COLUMNS} FROM batches WHERE owner = ? AND seq < ? ORDER BY seq DESC LIMIT ?",
        (owner, start, limit + 1),
    ).fetchall()
    return [load_batch(row) for row in rows[:limit]], len(rows) > limit


def _claim(server_id: str, served_model: str, db: Database) -> str | None:
    row = db.execute(
        "SELECT id FROM batches WHERE server_id = ? AND served_model = ? ORDER BY"
        " (SELECT COUNT(*) FROM batches AS other WHERE other.owner = batches.owner"
        " AND other.server_id IS NOT NULL AND other.server_id <> ?), seq LIMIT 1",
        (WAITING, served_model, WAITING),
    ).fetchone()
    if row is None:
        return None
    register(db, server_id)
    db.execute("UPDATE batches SET server_id = ? WHERE id = ?", (server_id, row[0]))
    return str(row[0])


def _answered(batch_id: str, db: Database) -> set[int]:
    rows = db.execute(
        "SELECT line FROM batch_results WHERE batch_seq = (SELECT seq FROM batches WHERE id = ?)", (batch_id,)
    )
    return {int(row[0]) for row in rows.fetchall()}


def _record(batch_id: str, server_id: str, results: Sequence[Result], db: Database) -> str | None:
    row = db.execute(
        "SELECT seq, status FROM batches WHERE id = ? AND server_id = ?", (batch_id, server_id)
    ).fetchone()
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
    db.execute(
        "UPDATE batches SET attempts = 0, num_completed = num_completed + ?, num_failed = num_failed + ?,"
        " input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?,"
        " output_tokens = output_tokens + ?, reasoning_tokens = reasoning_tokens + ? WHERE seq = ?",
        (
            num_completed,
            len(new) - num_completed,
            sum(result.tokens.input for result in new),
            sum(result.tokens.cached for result in new),
            sum(result.tokens.output for result in new),
            sum(result.tokens.reasoning for result in new),
            seq,
        ),
    )
    return str(status)


def _results(batch_id: str, completed: bool, after: int, limit: int, db: Database) -> list[tuple[int, bytes]]:
    rows = db.execute(
        "SELECT line, data FROM batch_results WHERE batch_seq = (SELECT seq FROM batches WHERE id = ?)"
        " AND completed = ? AND line > ? ORDER BY line LIMIT ?",
        (batch_id, int(completed), after, limit),
    )
    return [(int(line), bytes(data)) for line, data in rows.fetchall()]


_DONE = "SELECT seq FROM batches WHERE ended IS NOT NULL AND has_results = 1 LIMIT 1"


def _to_sweep(oldest: float, db: Database) -> bool:
    row = db.execute(f"SELECT EXISTS ({_DONE}) OR EXISTS (SELECT 1 FROM batches WHERE ended < ?)", (oldest,))
    return bool(row.fetchone()[0])


def _sweep(oldest: float, db: Database) -> None:
    if (done := db.execute(_DONE).fetchone()) is not None:
        lines = "SELECT batch_seq, line FROM batch_results WHERE batch_seq = ? LIMIT ?"
        rows = db.execute(lines, (done[0], _DELETED)).fetchall()
        db.executemany("DELETE FROM batch_results WHERE batch_seq = ? AND line = ?", rows)
        if len(rows) < _DELETED:
            db.execute("UPDATE batches SET has_results = 0 WHERE seq = ?", done)
    else:  # no batch that is deleted has records
        old = db.execute(f"SELECT seq FROM batches WHERE ended < ? LIMIT {_DELETED}", (oldest,)).fetchall()
        db.executemany("DELETE FROM batches WHERE seq = ?", old)


def _stats(db: Database) -> BatchStats:
    rows = db.execute("SELECT status, COUNT(*) FROM batches WHERE ended IS NULL GROUP BY status").fetchall()
    return BatchStats(dict.fromkeys(LIVE, 0) | dict(rows), *sizes(db))
