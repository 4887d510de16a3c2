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
from dataclasses import asdict
from pathlib import Path

import msgspec

from chorale.errors import ConfigError
from chorale_evals.record import Key, Record

NAME = "journal.jsonl"
_SYNC_SECONDS = 1.0


def records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yields each record with its byte offset, and skips an unfinished last line.

    A later record replaces an earlier one of the same key. Raises ``ConfigError``.
    """
    if not path.exists():
        raise ConfigError(f"{path.parent}: there is no run here ({NAME} is missing)")
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                # msgspec's decoder rejects a lone surrogate, which the model's text may contain.
                yield offset, msgspec.convert(json.loads(line), Record)
            except ValueError as error:
                told = f"not a record ({error}); remove the line, and its sample is asked again"
                raise ConfigError(f"{path}, line {number}: {told}") from None
            offset += len(line)


class Journal:
    """Appends to a run's journal, which only one process may have open. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder if it is missing. Raises ``ConfigError`` if another process writes there."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / NAME).open("ab+")
        except OSError as error:
            raise ConfigError(f"--out {folder}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"{folder}: another chorale eval is writing to this folder") from None
        self.folder = folder
        self._synced = time.monotonic()

    def read(self) -> dict[Key, Record]:
        """Removes an unfinished last line and returns the last record of each key, without its question.

        Call it before the first ``append``. Raises ``ConfigError``.
        """
        self._file.seek(0)
        end = sum(len(line) for line in self._file if line.endswith(b"\n"))
        self._file.truncate(end)
        return {record.key: record.light() for _, record in records(self.folder / NAME)}

    def append(self, record: Record) -> None:
        line = json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":"))
        try:
            self._file.write(line.encode("utf-8", "surrogatepass") + b"\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{self.folder / NAME}: {error.strerror}; run the command again") from None
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._sync()
        self._file.close()
