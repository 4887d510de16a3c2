"""The journal of a run: one JSON line per answer, appended and never rewritten.

A line counts once it ends in a line feed. After a kill, an unfinished last line is removed, and its sample is
asked again. Each line is flushed to the operating system at once, so a killed process loses none; ``fsync``
follows within a second, so that a power failure loses at most the lines of about a second.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from chorale_evals.errors import JournalError
from chorale_evals.record import Key, Record

NAME = "journal.jsonl"
_SYNC_SECONDS = 1.0


def read_journal(folder: Path, *, whole: bool = True) -> dict[Key, Record]:
    """Returns the last record of each key, without an unfinished last line. Raises ``JournalError``.

    ``whole``: with questions and exchanges, which are most of a journal.
    """
    return {record.key: record if whole else record.light() for _, record in _records(folder / NAME)}


def locate(folder: Path) -> dict[Key, int]:
    """Returns the byte at which the last record of each key begins. Raises ``JournalError``."""
    return {record.key: place for place, record in _records(folder / NAME)}


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yields each record and the byte at which it begins, without an unfinished last line."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise JournalError(f"{path.parent}: there is no run here ({NAME} is missing)") from None
    with file:
        yield from _lines(file, path)


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, Record]]:
    place = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield place, Record.from_json(json.loads(line))
            place += len(line)
        except (ValueError, TypeError) as error:
            raise JournalError(
                f"{path}, line {number}: {error}; remove the line, and its sample is asked again"
            ) from None


class Journal:
    """Appends to a run's journal, which only one process may have open. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder if it is missing. Raises ``JournalError`` if another process writes there."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / NAME).open("ab+")
        except OSError as error:
            raise JournalError(f"--out {folder}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise JournalError(f"{folder}: another chorale eval is writing to this folder") from None
        self.folder = folder
        self._synced = time.monotonic()

    def read(self) -> dict[Key, Record]:
        """Removes an unfinished last line and returns the records. Called before the first ``append``."""
        size = self._file.seek(0, os.SEEK_END)
        end = _end_of_lines(self._file, size)
        if end < size:
            self._file.truncate(end)
        return read_journal(self.folder, whole=False)

    def append(self, record: Record) -> None:
        line = json.dumps(record.to_json(), ensure_ascii=False, separators=(",", ":"))
        try:
            self._file.write(line.encode("utf-8", "surrogatepass") + b"\n")
            self._file.flush()
        except OSError as error:
            raise JournalError(f"{self.folder / NAME}: {error.strerror}; the same command goes on") from None
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.sync()
        self._file.close()


def _end_of_lines(file: BinaryIO, size: int) -> int:
    """Returns the position after the last line feed."""
    place = size
    while place > 0:
        start = max(0, place - 2**16)
        file.seek(start)
        found = file.read(place - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        place = start
    return 0
