"""Database: the subset of SQL that SQLite and PostgreSQL share, so that both run the same statements.

Statements use ``?`` for parameters and BLOBs for JSON and token ids. Differences (types, triggers, how a
write begins) are in ``sqlite`` and ``postgres``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from chorale.errors import invalid


class Database(Protocol):
    """One connection, used by one thread. Write transactions of all processes exclude each other."""

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

    def has_tables(self) -> bool:
        """Returns whether the store's tables exist."""
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
        """Releases some unused space to the operating system. Called while idle, outside a transaction.

        Returns whether there is more to release.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Paged:
    """A table that is listed in pages: the rows with one value of ``scope``, ordered by ``key``."""

    table: str
    scope: str = "owner"
    key: str = "seq"


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list. ``after``: the id of the last entry of the previous page."""

    after: str | None = None
    limit: int = 20
    newest_first: bool = False


def read_page(
    db: Database,
    of: Paged,
    scope: object,
    columns: str,
    page: Page,
    also: str = "",
    values: Sequence[object] = (),
) -> tuple[list[Any], bool]:
    """Returns (rows, whether more follow). Raises ``RequestError`` if ``page.after`` is no row of the list.

    ``also``: an additional SQL condition, with its parameters ``values``.
    """
    start = 2**62 if page.newest_first else -1
    if page.after is not None:
        query = f"SELECT {of.key} FROM {of.table} WHERE id = ? AND {of.scope} = ?"
        row = db.execute(query, (page.after, scope)).fetchone()
        if row is None:
            raise invalid("after", f"{page.after[:128]!r} is not in this list")
        start = row[0]
    beyond, order = ("<", "DESC") if page.newest_first else (">", "ASC")
    rows = db.execute(
        f"SELECT {columns} FROM {of.table} WHERE {of.scope} = ? AND {of.key} {beyond} ?{also}"
        f" ORDER BY {of.key} {order} LIMIT ?",
        (scope, start, *values, page.limit + 1),
    ).fetchall()
    return rows[: page.limit], len(rows) > page.limit
