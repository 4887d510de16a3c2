"""Runs a file of lines in this process, and keeps the records in a private store next to the output.

The store is a server's SQLite store with a single batch. If a run was killed, the next one claims its batch
and sends the lines that have no record (``chorale.jobs.lines``).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from chorale.errors import ChoraleError, ConfigError
from chorale.ids import new_id
from chorale.jobs.contents import read_file
from chorale.jobs.execute import PATIENT, LineRetries, Sender
from chorale.jobs.input import Inspection
from chorale.jobs.line import ENDPOINTS, MAX_LINE_BYTES, Record, refused
from chorale.jobs.lines import InputLine, LineWork, Sending, packed, stored
from chorale.jobs.slots import MAX_LINES_BYTES, Slots
from chorale.store.batch_rows import BatchNotFoundError, Result, StoredBatch
from chorale.store.files import StoredFile, new_file_id
from chorale.store.protocol import StoreError
from chorale.store.store import SqliteStore

BATCH_ID = f"batch_{0:032x}"  # id of the only batch in a private store
_OWNER, _MODEL = b"", ""
_SQLITE_HEADER = b"SQLite format 3\0"


class ServerGoneError(ChoraleError, code="server_gone"):
    """The server has stopped answering: no line was answered while a line was retried."""


class FileWork(LineWork):
    """Sends the lines of a file. Unlike a server's batch, it does not wait for a failed disk or server: it
    raises ``StoreError`` or ``ServerGoneError``."""

    _last_answer = 0.0  # time.monotonic()
    _gone: ServerGoneError | None = None

    async def run(self) -> None:
        """Returns once all lines are done, or after ``interrupt`` those in flight."""
        self._last_answer = time.monotonic()
        await self._answer()
        if self._gone is not None:
            raise self._gone

    def interrupt(self) -> None:
        """First call: sends no further line and finishes those in flight. Second call: aborts them."""
        self.stop("cancelling" if self._stopped else "leaving")
        self._slots.end()

    async def _wait(self, error: ChoraleError) -> None:
        raise error

    def _add(self, sent: InputLine, record: Record) -> None:
        if record.answer is not None:
            self._last_answer = time.monotonic()
        elif time.monotonic() - self._last_answer > self._sending.retries.patience / 2:
            assert record.fault is not None
            message = f"{record.fault.message}; the same command sends the lines that are left"
            self._gone = ServerGoneError(message)
            self.stop("cancelling")
            return
        super()._add(sent, record)


class Journal:
    """The records of a run. Its methods block, and each runs its own event loop.

    ``batch``: the batch when the journal was opened; lines that cannot be sent already have a record.
    ``num_before``: the number of records of earlier runs.
    """

    def __init__(
        self,
        path: Path,
        source: Path,
        target: str,
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
        restart: bool = False,
    ) -> None:
        """Opens or creates the store at ``path`` for the file ``source``. ``target``: the model or server.

        Raises ``ConfigError`` if ``source`` cannot be read, or if ``path`` is not a journal, has the records
        of another input or target (unless ``restart``), or is in use by another process. Every method raises
        ``StoreError`` if the disk fails.
        """
        self._path, self._source, self._max_line_bytes = path, source, max_line_bytes
        run = {"input_sha256": _sha256(source), "target": target}
        if path.exists() and path.stat().st_size and not _is_store(path):
            raise ConfigError(f"{path} is not a journal of run-batch; move it away")
        self._server_id = new_id("srv")
        self._store = SqliteStore(str(path))
        self._rows = self._store.batches
        try:
            self.num_before, self.batch = asyncio.run(self._open(run, restart))
        except BaseException:
            self.close()
            raise

    async def _open(self, run: dict[str, str], restart: bool) -> tuple[int, StoredBatch]:
        try:
            batch = await self._rows.get(BATCH_ID, _OWNER)
        except BatchNotFoundError:
            await self._create(run)
        else:
            if await self._rows.claim(self._server_id, _MODEL) is None:
                raise ConfigError(f"{self._path}: another run-batch is writing this output")
            if restart:
                await self._rows.delete(BATCH_ID, self._server_id)
                await self._create(run)
            elif batch.body["run"] != run:
                raise ConfigError(f"{self._path} {_difference(batch.body['run'], run)}")
        batch = await self._rows.get(BATCH_ID, _OWNER)
        if batch.status == "validating":
            await self._check()
        return batch.num_done, await self._rows.get(BATCH_ID, _OWNER)

    async def _create(self, run: dict[str, str]) -> None:
        now = self._rows.now
        file = StoredFile(new_file_id(), _OWNER, now, None, "batch", self._source.name, 0)
        await self._store.files.begin(file, self._server_id)
        await self._store.files.finish(file, self._server_id)
        body = {"run": run}
        batch = StoredBatch(BATCH_ID, _OWNER, "validating", now, math.inf, file.id, body)
        await self._rows.create(batch, _MODEL, max_live=1)
        await self._rows.claim(self._server_id, _MODEL)

    async def _check(self) -> None:
        """Counts all lines, and stores a record for each that cannot be sent."""
        found = Inspection(ENDPOINTS, self._max_line_bytes, busy_share=1.0)
        async with contextlib.aclosing(found.read(read_file(self._source))) as checked:
            async for faults in checked:
                results = [packed(number, refused(error)) for number, error in faults]
                await self._rows.record(BATCH_ID, self._server_id, results)
        await self._rows.begin(BATCH_ID, self._server_id, found.num_lines, None)

    def work(
        self,
        send: Sender,
        concurrency: int,
        counted: Callable[[Sequence[Result]], None] = lambda results: None,
        retries: LineRetries = PATIENT,
    ) -> FileWork:
        """Returns the work on the lines that have no record. It may run in any event loop."""
        return FileWork(
            self.batch,
            self._rows,
            self._server_id,
            lambda: read_file(self._source),
            sending=Sending(send, Slots(lambda: concurrency, MAX_LINES_BYTES), retries),
            max_line_bytes=self._max_line_bytes,
            counted=counted,
        )

    def now(self) -> StoredBatch:
        """Returns the current state of the batch."""
        return asyncio.run(self._rows.get(BATCH_ID, _OWNER))

    def write_to(self, file: BinaryIO) -> None:
        """Writes all records, in the order of the input."""
        asyncio.run(self._write(file.write, None))
        file.flush()

    def failures(self) -> Counter[str]:
        """Returns the number of failed lines by HTTP status or error code."""
        found: Counter[str] = Counter()

        def count(records: bytes) -> None:
            found.update(map(_kind, records.splitlines()))

        asyncio.run(self._write(count, False))
        return found

    async def _write(self, write: Callable[[bytes], object], completed: bool | None) -> None:
        async for records in stored(self._rows, BATCH_ID, completed):
            write(records)

    def close(self, *, remove: bool = False) -> None:
        """Closes the journal, so that another run can continue, or deletes it if ``remove``."""
        asyncio.run(self._close())
        if remove:
            for suffix in ("", "-wal", "-shm", ".lock"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)

    async def _close(self) -> None:
        with contextlib.suppress(StoreError):
            await self._rows.release(self._server_id)
        await self._store.close()


class _Response(msgspec.Struct):
    status_code: int


class _Error(msgspec.Struct):
    code: str = ""


class _Outcome(msgspec.Struct):
    response: _Response | None
    error: _Error | None


_outcome = msgspec.json.Decoder(_Outcome)


def _kind(record: bytes) -> str:
    found = _outcome.decode(record)
    if found.error is not None:
        return found.error.code
    return f"HTTP {0 if found.response is None else found.response.status_code}"


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"--input-file {path}: {error.strerror}") from None


def _is_store(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_SQLITE_HEADER)) == _SQLITE_HEADER


def _difference(found: dict[str, str], run: dict[str, str]) -> str:
    other = "model or server" if found["input_sha256"] == run["input_sha256"] else "input"
    return (
        f"contains the records of an interrupted run of another {other}; --restart discards them, another "
        "--output-file keeps them"
    )
