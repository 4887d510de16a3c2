"""Database: the subset of SQL that SQLite and PostgreSQL share, so that both run the same statements.

Statements use ``?`` for parameters and BLOBs for JSON and token ids. Differences (types, triggers, how a
write begins) are in ``sqlite`` and ``postgres``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class Database(Protocol):
    """One connection, used by one thread. A write transaction excludes all others, of every process."""

    @property
    def errors(self) -> type[Exception]:
        """The driver's exceptions."""
        ...

    @property
    def broken(self) -> bool:
        """True if the connection is lost; a new one may work."""
        ...

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Any:
        """Returns a cursor: ``fetchone``, ``fetchall``, ``rowcount``, iteration."""
        ...

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Any: ...

    def columns(self, table: str) -> set[str]:
        """Returns the names of a table's columns; empty if the table does not exist."""
        ...

    def is_busy(self, error: Exception) -> bool:
        """Returns whether an error of the driver means that a lock was not released in time."""
        ...

    def begin(self, writes: bool, seconds: float) -> None:
        """Begins a transaction; reads see one snapshot. ``seconds``: how long to wait for a lock."""
        ...

    def commit(self) -> None: ...

    def rollback(self) -> None:
        """Rolls back; does nothing outside a transaction."""
        ...

    def give_back(self, num_evicted: int) -> bool:
        """Returns some unused space to the system, while idle and outside a transaction.

        Returns whether more is left.
        """
        ...

    def close(self) -> None: ...


def page_start(db: Database, table: str, owner: bytes, after: str | None, newest_first: bool) -> int | None:
    """Returns the ``seq`` beyond which a page of an owner's rows begins, or None if ``after`` is no row."""
    if after is None:
        return 2**62 if newest_first else -1
    row = db.execute(f"SELECT seq FROM {table} WHERE id = ? AND owner = ?", (after, owner)).fetchone()
    return None if row is None else int(row[0])
