"""SQLite for the response store: opens, checks and locks the file, and renames a damaged one."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
import time
from pathlib import Path

from chorale.store.database.connection_thread import LOCK_SECONDS
from chorale.store.database.schema import create
from chorale.store.protocol import NoSpaceError, StoreError

logger = logging.getLogger(__name__)

_TYPES = {"SERIAL": "INTEGER PRIMARY KEY", "INT": "INTEGER", "FLOAT": "REAL", "BYTES": "BLOB"}
_TRIGGER = "CREATE TRIGGER {name} AFTER {event} ON {table} BEGIN {statements} END"
MEMORY = ":memory:"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Larger files are not checked at start: checking 128 MiB takes 0.2 s. Damage in a larger file is found when
# it is read, and only the responses at that position are lost.
_CHECK_BYTES = 128 * 2**20
_VACUUM_PAGES = 256  # SQLite pages released by one call
_LEAST_BYTES = 256 * 2**10  # with less free space, errors are attributed to a full disk


class SqliteDatabase(sqlite3.Connection):
    """A ``Database`` on a connection of ``sqlite3``."""

    errors = sqlite3.Error
    broken = False

    def is_busy(self, error: Exception) -> bool:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

    def has_tables(self) -> bool:
        query = "SELECT 1 FROM sqlite_master WHERE name = 'schema_version'"
        return self.execute(query).fetchone() is not None

    def begin(self, writes: bool, seconds: float) -> None:
        self.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
        self.execute("BEGIN IMMEDIATE" if writes else "BEGIN")

    def give_back(self, num_evicted: int) -> bool:
        num_free = self.execute("PRAGMA freelist_count").fetchone()[0]
        if num_evicted or num_free > _VACUUM_PAGES:
            # Each step frees one SQLite page. ``execute`` makes one step, as the statement has no columns.
            self.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
        return bool(num_free > 2 * _VACUUM_PAGES)


def connect(path: str, *, creating: bool) -> SqliteDatabase:
    """Opens a connection. Raises ``NoSpaceError`` if the disk is full or read-only, else ``StoreError``."""
    # isolation_level=None: transactions are explicit. check_same_thread=False: the connection is opened in
    # one thread and then used only by another.
    try:
        connection = sqlite3.connect(
            path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False, factory=SqliteDatabase
        )
        try:
            _set_up(connection, path, creating)
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise _fault(Path(path), error) from error
    return connection


def _set_up(connection: SqliteDatabase, path: str, creating: bool) -> None:
    connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # has no effect after the first table
    if path != MEMORY:
        connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
    if creating:
        _create(connection)


def _create(connection: SqliteDatabase) -> None:
    if connection.has_tables():  # does not write: the disk may be full
        create(connection, _TYPES, _TRIGGER)
        return
    connection.begin(writes=True, seconds=LOCK_SECONDS)
    try:
        create(connection, _TYPES, _TRIGGER, " WITHOUT ROWID")  # unless another process was first
        connection.commit()
    except BaseException:
        connection.rollback()
        raise


def is_read_only(folder: Path) -> bool:
    """Returns whether ``folder``, or its nearest existing parent, is on a read-only disk."""
    return bool(_disk(folder).f_flag & os.ST_RDONLY)


def _disk(folder: Path) -> os.statvfs_result:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.statvfs(folder)


def _fault(path: Path, error: Exception) -> StoreError:
    """Returns the error to raise. Checks the disk too: SQLite's codes for a full disk vary."""
    message = f"cannot open the response store {path}: {error}"
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    no_space = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)
    no_space = no_space or getattr(error, "errno", None) in NO_SPACE
    if not no_space:
        disk = _disk(path.parent)
        no_space = bool(disk.f_flag & os.ST_RDONLY) or disk.f_bavail * disk.f_frsize < _LEAST_BYTES
    return NoSpaceError(message) if no_space else StoreError(message)


def prepare_file(path: Path) -> tuple[int, bool]:
    """Creates the folder and the file (mode 0600), checks the file, and locks it.

    The first process to open a file checks it under an exclusive lock; others wait and skip the check.
    Returns the lock's file descriptor, and whether the lock is exclusive (no other process uses the file).
    ``share_file`` admits others. Raises ``StoreError``, or ``NoSpaceError`` if the disk is full.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _fault(path, error) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock_fd, fcntl.LOCK_SH)
        return lock_fd, False
    try:
        _check_or_quarantine(path)
    except OSError as error:  # a damaged file could not be replaced
        os.close(lock_fd)
        raise _fault(path, error) from error
    return lock_fd, True


def share_file(lock_fd: int) -> None:
    fcntl.flock(lock_fd, fcntl.LOCK_SH)


def _check_or_quarantine(path: Path) -> None:
    """Renames a damaged file and its log, and creates an empty file."""
    problem = _damage(path)
    if problem is None:
        return
    suffix = time.strftime("corrupt-%Y%m%d-%H%M%S")
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        if name.exists():
            name.rename(f"{name}.{suffix}")
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    logger.error("the response store %s was damaged (%s) and was moved to %s.%s", path, problem, path, suffix)


def _damage(path: Path) -> str | None:
    check = "quick_check(1)" if path.stat().st_size <= _CHECK_BYTES else "schema_version"
    try:
        connection = sqlite3.connect(path, timeout=10.0)
        try:
            rows = connection.execute(f"PRAGMA {check}").fetchall()
        finally:
            connection.close()
    except sqlite3.OperationalError:
        return None  # locked or unreadable, not damaged; opening it reports the error
    except sqlite3.DatabaseError as error:
        return str(error)
    return None if check == "schema_version" or rows == [("ok",)] else str(rows[0][0])
