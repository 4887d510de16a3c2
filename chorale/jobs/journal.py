"""The journal of a batch that a process runs from a file: records in the order in which they were done.

After a kill, the next run reads it and sends only the lines that are missing. Its first line names the input
and the model; each other line is the number of a line of the input, a space, and that line's record. The
output is made of it, in the order of the input, once all lines are done.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from chorale.errors import ChoraleError, ConfigError

FORMAT = 1
_MISSING = -1
_SYNC_SECONDS = 1.0


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a journal belongs to."""

    format: int = FORMAT
    input_sha256: str
    num_lines: int
    target: str  # the model, or the server's URL


class Journal:
    """One run's journal, locked while it is open. ``done`` lines have a record."""

    def __init__(self, path: Path, header: Header, *, restart: bool = False) -> None:
        """Opens or makes the journal.

        Raises ``ConfigError`` if it belongs to another run or another process has it open.
        """
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        # Positions of the records, by line number.
        self._starts = array.array("q", [_MISSING]) * (header.num_lines + 1)
        self.num_done = 0
        self._unsynced = False
        try:
            _lock(self._file, path)
            if restart:
                os.ftruncate(self._file, 0)
            self._end = self._read(header)
        except BaseException:
            os.close(self._file)
            raise

    def _read(self, header: Header) -> int:
        """Reads what an earlier run left, and returns the end. Cuts off a record that was not finished."""
        with open(os.dup(self._file), "rb") as file:
            file.seek(0)
            first = file.readline()
            if not first.endswith(b"\n"):
                os.ftruncate(self._file, 0)
                return self._append(msgspec.json.encode(header), 0)
            self._check(first, header)
            end = len(first)
            for raw in file:
                number = _number_of(raw, len(self._starts))
                if number is None:
                    break
                self._note(number, end + raw.index(b" ") + 1)
                end += len(raw)
        os.ftruncate(self._file, end)
        return end

    def _check(self, first: bytes, header: Header) -> None:
        try:
            found = msgspec.json.decode(first, type=Header)
        except (ValueError, msgspec.MsgspecError):
            raise ConfigError(f"{self.path} is not a journal of run-batch; move it away") from None
        if found == header:
            return
        differs = "of another version" if found.format != header.format else "of another model or server"
        if found.input_sha256 != header.input_sha256:
            differs = "of another input"
        raise ConfigError(
            f"{self.path} holds the records of an interrupted run {differs}; --restart discards them, "
            "another --output-file keeps them"
        )

    def _note(self, number: int, start: int) -> None:
        self.num_done += self._starts[number] == _MISSING
        self._starts[number] = start

    def has(self, number: int) -> bool:
        """Returns whether line ``number`` (from 1) has a record."""
        return self._starts[number] != _MISSING

    def add(self, number: int, record: bytes) -> None:
        """Adds a record. It survives the end of this process at once, a power failure after a second.

        Raises ``ChoraleError``.
        """
        prefix = b"%d " % number
        start = self._end
        self._end = self._append(prefix + record, start)
        self._note(number, start + len(prefix))
        self._unsynced = True

    def _append(self, data: bytes, start: int) -> int:
        left = memoryview(data + b"\n")
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            raise ChoraleError(f"{self.path}: {error.strerror}") from None
        return start + len(data) + 1

    def records(self) -> Iterator[bytes]:
        """Yields the records in the order of the input, each with its line end."""
        with open(os.dup(self._file), "rb", buffering=2**16) as file:
            for start in self._starts:
                if start != _MISSING:
                    file.seek(start)
                    yield file.readline()

    @contextlib.asynccontextmanager
    async def synced(self) -> AsyncIterator[None]:
        """Writes to the disk once a second, in a thread."""
        task = asyncio.create_task(self._sync_often())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_SECONDS)
            if self._unsynced:
                self._unsynced = False
                await asyncio.to_thread(os.fsync, self._file)

    def write_to(self, file: BinaryIO) -> None:
        """Writes all records to ``file``, and to the disk if it is there."""
        file.writelines(self.records())
        file.flush()
        with contextlib.suppress(OSError):  # a pipe
            os.fsync(file.fileno())

    def close(self, *, remove: bool = False) -> None:
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


def _lock(descriptor: int, path: Path) -> None:
    """Raises ``ConfigError`` if another process has the file open. Its lock ends with the process."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(f"{path}: another run-batch is writing this output") from None


def _number_of(raw: bytes, end: int) -> int | None:
    """Returns the line number of a whole record, else None."""
    head, space, record = raw.partition(b" ")
    if not (raw.endswith(b"\n") and space and head.isdigit() and len(head) < 16 and 0 < int(head) < end):
        return None
    try:
        msgspec.json.decode(record, type=msgspec.Raw)
    except (ValueError, msgspec.MsgspecError):
        return None
    return int(head)
