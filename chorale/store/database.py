"""Database: the little that the store needs of SQL, so that SQLite and PostgreSQL run the same statements.

Statements use ``?`` for parameters, BLOBs for JSON and token ids, and nothing that only one of the two
knows; what differs (types, triggers, how a write is begun) is in ``sqlite`` and ``postgres``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class Database(Protocol):
    """One connection, used by one thread. A write transaction excludes every other one, of any process."""

    @property
    def errors(self) -> type[Exception]:
        """What the driver raises."""
        ...

    @property
    def broken(self) -> bool:
        """The connection is gone; a new one may work."""
        ...

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Any:
        """A cursor: ``fetchone``, ``fetchall``, ``rowcount``, iteration."""
        ...

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Any: ...

    def columns(self, table: str) -> set[str]:
        """The names of a table's columns; empty if there is no such table."""
        ...

    def is_busy(self, error: Exception) -> bool:
        """Whether an error of the driver says that a lock was not free in time."""
        ...

    def begin(self, writes: bool, seconds: float) -> None:
        """A reading transaction sees one moment of the database. ``seconds``: how long to wait for a lock."""
        ...

    def commit(self) -> None: ...

    def rollback(self) -> None:
        """Does nothing outside of a transaction."""
        ...

    def give_back(self, num_evicted: int) -> None:
        """Idle work: return unused space, outside of a transaction."""
        ...

    def close(self) -> None: ...
