"""Files: the rows of files, whose contents are stored elsewhere (``chorale.jobs.contents``).

A row is added before its content and deleted after it, so every content has a row. The state is ``uploading``
while a server process writes the content, then ``ready``, then ``gone`` until the content is deleted. Quotas
count an unfinished upload with its maximum size. If its server dies, its state becomes ``gone``.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from dataclasses import dataclass
from typing import Any

from chorale.config.engine import ServerConfig
from chorale.errors import ConflictError, NotFoundError, PayloadTooLargeError, QueueFullError
from chorale.store.access import Access, Rows, reads, writes
from chorale.store.database.sql import Database, Page, Paged, read_page
from chorale.store.jobs import register
from chorale.store.protocol import StoreError

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_COLUMNS = "id, owner, created, expires, purpose, filename, num_bytes"
_READY = "state = 'ready' AND (expires IS NULL OR expires > ?)"
_EXPIRED = (
    "state = 'ready' AND expires <= ?"  # matches the condition of index files_expires
    " AND NOT EXISTS (SELECT 1 FROM batches WHERE input_file_id = files.id AND ended IS NULL)"
)
_SWEPT = 64  # most files per call of ``sweep``


def new_file_id() -> str:
    """Returns ``file-`` and 32 hexadecimal digits, the form of OpenAI's ids."""
    return f"file-{secrets.token_hex(16)}"


class FileNotFoundFault(NotFoundError, code="file_not_found"): ...


class FileInUseError(ConflictError, code="file_in_use"): ...


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    owner: bytes  # hash of the API key, or empty; other keys cannot see it
    created: float
    expires: float | None
    purpose: str
    filename: str
    num_bytes: int

    def to_object(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": int(self.created),
            "expires_at": None if self.expires is None else int(self.expires),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Files(Rows):
    """The rows of all files."""

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        self._failed: set[str] = set()  # failed uploads whose rows are still ``uploading``

    @writes
    def begin(self, db: Database, file: StoredFile, server_id: str, quota: ServerConfig | None = None) -> int:
        """Adds the row of an upload. ``file.num_bytes``: its maximum size, or 0 if unknown. ``quota``: the
        limits of files, for uploads of clients.

        Returns its maximum size in bytes, which the quota counts until ``finish``. Raises ``QueueFullError``
        or ``PayloadTooLargeError`` if the quota does not allow it.
        """
        room = file.num_bytes if quota is None else _room(db, file, quota)
        register(db, server_id)
        db.execute(
            f"INSERT INTO files ({_COLUMNS}, state, server_id) VALUES (?, ?, ?, ?, ?, ?, ?, 'uploading', ?)",
            (file.id, file.owner, file.created, file.expires, file.purpose, file.filename, room, server_id),
        )
        return room

    @writes
    def finish(self, db: Database, file: StoredFile, server_id: str) -> bool:
        """Makes an uploaded file ready. Returns False if the server no longer owns the upload."""
        return finish_upload(db, file, server_id)

    @reads
    def get(self, db: Database, file_id: str, owner: bytes) -> StoredFile:
        """Returns a file. Raises ``FileNotFoundFault``."""
        return find_file(db, file_id, owner, self.now)

    @reads
    def page(
        self, db: Database, owner: bytes, page: Page, purpose: str | None = None
    ) -> tuple[list[StoredFile], bool]:
        """Returns (files, whether more follow). Raises as ``read_page``."""
        values: tuple[object, ...] = (self.now,)
        also = f" AND {_READY}"
        if purpose is not None:
            also, values = f"{also} AND purpose = ?", (*values, purpose)
        rows, has_more = read_page(db, Paged("files"), owner, _COLUMNS, page, also, values)
        return list(map(_to_file, rows)), has_more

    @writes
    def delete(self, db: Database, file_id: str, owner: bytes) -> None:
        """Deletes a file. Raises ``FileNotFoundFault``, or ``FileInUseError`` if a live batch reads it."""
        find_file(db, file_id, owner, self.now)
        user = db.execute("SELECT id FROM batches WHERE input_file_id = ? AND ended IS NULL", (file_id,))
        if (row := user.fetchone()) is not None:
            message = f"{file_id} is the input of {row[0]}, which has not ended; cancel it first"
            raise FileInUseError(message, param="file_id")
        db.execute("UPDATE files SET state = 'gone', num_bytes = 0 WHERE id = ?", (file_id,))

    async def drop(self, file_id: str) -> bool:
        """Ends a failed upload. If the store fails too, a later ``sweep`` ends the upload.

        Returns True if its content may be deleted now.
        """
        self._failed.add(file_id)
        with contextlib.suppress(StoreError):
            return await self._drop([file_id]) > 0
        return False

    async def sweep(self) -> list[str]:
        """Marks expired files as gone. Returns the ids of files whose content must be deleted."""
        if self._failed:
            await self._drop(list(self._failed))
        return await self._expire() if await self._is_due() else []

    @writes
    def forget(self, db: Database, file_ids: list[str]) -> None:
        """Removes the rows of files whose content was deleted."""
        rows = [(file_id,) for file_id in file_ids]
        db.executemany("DELETE FROM files WHERE id = ? AND state = 'gone'", rows)

    async def _drop(self, file_ids: list[str]) -> int:
        num = await self._abandon(file_ids)
        self._failed.difference_update(file_ids)
        return num

    @writes
    def _abandon(self, db: Database, file_ids: list[str]) -> int:
        query = (
            "UPDATE files SET state = 'gone', server_id = NULL, num_bytes = 0"
            " WHERE id = ? AND state = 'uploading'"
        )
        return int(db.executemany(query, [(file_id,) for file_id in file_ids]).rowcount)

    @reads
    def _is_due(self, db: Database) -> bool:
        row = db.execute(
            "SELECT EXISTS (SELECT 1 FROM files WHERE state = 'gone')"
            f" OR EXISTS (SELECT 1 FROM files WHERE {_EXPIRED})",
            (self.now,),
        )
        return bool(row.fetchone()[0])

    @writes
    def _expire(self, db: Database) -> list[str]:
        expired = f"SELECT seq FROM files WHERE {_EXPIRED} ORDER BY expires LIMIT {_SWEPT}"
        db.execute(f"UPDATE files SET state = 'gone', num_bytes = 0 WHERE seq IN ({expired})", (self.now,))
        rows = db.execute(f"SELECT id FROM files WHERE state = 'gone' ORDER BY seq LIMIT {_SWEPT}")
        return [row[0] for row in rows.fetchall()]


# --------------------------------------------------------------------------- statements


def find_file(db: Database, file_id: str, owner: bytes, now: float) -> StoredFile:
    """Returns a ready file. Raises ``FileNotFoundFault``."""
    row = None
    if FILE_ID.fullmatch(file_id):
        query = f"SELECT {_COLUMNS} FROM files WHERE id = ? AND owner = ? AND {_READY}"
        row = db.execute(query, (file_id, owner, now)).fetchone()
    if row is None:
        raise FileNotFoundFault(f"no file with id {file_id[:128]!r}", param="file_id")
    return _to_file(row)


def finish_upload(db: Database, file: StoredFile, server_id: str) -> bool:
    changed = db.execute(
        "UPDATE files SET state = 'ready', server_id = NULL, created = ?, expires = ?, purpose = ?,"
        " filename = ?, num_bytes = ? WHERE id = ? AND server_id = ?",
        (file.created, file.expires, file.purpose, file.filename, file.num_bytes, file.id, server_id),
    )
    return bool(changed.rowcount)


def end_uploads(db: Database, server_id: str) -> None:
    """Ends the uploads of a dead server."""
    db.execute(
        "UPDATE files SET state = 'gone', server_id = NULL, num_bytes = 0 WHERE server_id = ?", (server_id,)
    )


def sizes(db: Database) -> tuple[int, int]:
    """Returns (number of files, their bytes), including unfinished uploads."""
    return _counted(db, "SELECT COALESCE(SUM(num_files), 0), COALESCE(SUM(num_bytes), 0) FROM file_totals")


def _counted(db: Database, query: str, *values: bytes) -> tuple[int, int]:
    row = db.execute(query, values).fetchone()
    return (0, 0) if row is None else (int(row[0]), int(row[1]))


def _room(db: Database, file: StoredFile, quota: ServerConfig) -> int:
    """Returns the maximum size of the file in bytes. Raises an error if the quota does not allow it."""
    num, size = _counted(db, "SELECT num_files, num_bytes FROM file_totals WHERE owner = ?", file.owner)
    if num >= quota.batch_max_files:
        raise QueueFullError(
            f"you have {num} files, and this server keeps at most {quota.batch_max_files} for each API key "
            "(--batch-max-files); delete some",
            code="file_quota_exceeded",
        )
    left = quota.batch_max_bytes - size
    if file.num_bytes > left or left <= 0:
        raise PayloadTooLargeError(
            f"your files have {size} bytes, and this server keeps at most {quota.batch_max_bytes} for each "
            "API key (--batch-max-bytes); delete some",
            code="file_quota_exceeded",
        )
    free = quota.batch_max_total_bytes - sizes(db)[1]
    if file.num_bytes > free or free <= 0:
        raise PayloadTooLargeError(
            "the server's room for files is used up (--batch-max-total-bytes)", code="storage_full"
        )
    return file.num_bytes or min(quota.batch_max_file_bytes, left, free)


def _to_file(row: tuple[Any, ...]) -> StoredFile:
    file_id, owner, created, expires, purpose, filename, num_bytes = row
    return StoredFile(file_id, bytes(owner), created, expires, purpose, filename, int(num_bytes))
