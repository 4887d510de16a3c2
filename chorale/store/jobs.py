"""Jobs: ownership of rows by server processes, the servers' heartbeats, and the expiry of dead servers.

A row with a ``server_id`` belongs to that server, or waits for one (``WAITING``). These rows are responses,
leased conversations, uploads and batches. A server is registered before it owns anything, and each of its
writes requires its id, so a server that was declared dead can no longer write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chorale.store.access import Access, Rows, reads, writes
from chorale.store.database.sql import Database

WAITING = "waiting"  # ``server_id`` of rows that wait for a server
_TABLES = ("responses", "conversations", "files", "batches")  # tables with a column ``server_id``


class Jobs(Rows):
    """The server processes of a store. ``end``: ends all work of a server, and returns the ids of the
    responses that failed."""

    def __init__(self, access: Access, end: Callable[[Database, str], list[str]]) -> None:
        super().__init__(access)
        self._end = end

    @writes
    def beat(self, db: Database, server_id: str) -> set[str]:
        """Records a heartbeat. Returns the ids of the server's live responses.

        Unregisters a server that owns nothing, so that idle servers write nothing.
        """
        query = "SELECT id FROM responses WHERE server_id = ?"
        live = {row[0] for row in db.execute(query, (server_id,)).fetchall()}
        if live or any(_owns(db, table, server_id) for table in _TABLES):
            db.execute("UPDATE servers SET beat = beat + 1 WHERE id = ?", (server_id,))
        else:
            db.execute("DELETE FROM servers WHERE id = ?", (server_id,))
        return live

    @reads
    def servers(self, db: Database) -> dict[str, int]:
        """Returns the number of heartbeats of every registered server."""
        return dict(db.execute("SELECT id, beat FROM servers").fetchall())

    @writes
    def expire(self, db: Database, server_id: str, beat: int | None) -> list[str]:
        """Releases or ends everything that a dead server owns, if it still has ``beat`` heartbeats.

        Returns the ids of the responses that failed. A process that stops normally expires itself, with
        ``beat`` None.
        """
        row = db.execute("SELECT beat FROM servers WHERE id = ?", (server_id,)).fetchone()
        return [] if row is None or beat not in (None, row[0]) else self._end(db, server_id)


# --------------------------------------------------------------------------- statements


def register(db: Database, server_id: str) -> None:
    """Registers the server, which must happen before it owns anything."""
    db.execute("INSERT INTO servers (id, beat) VALUES (?, 0) ON CONFLICT (id) DO NOTHING", (server_id,))


def take(db: Database, table: str, row_id: str, server_id: str) -> bool:
    """Assigns a waiting row to the server. Returns False if the row is not waiting."""
    register(db, server_id)
    changed = db.execute(
        f"UPDATE {table} SET server_id = ? WHERE id = ? AND server_id = ?", (server_id, row_id, WAITING)
    )
    return bool(changed.rowcount)


def owned(db: Database, table: str, columns: str, row_id: str, server_id: str) -> Any:
    """Returns the columns of a row, or None if the server does not own it."""
    query = f"SELECT {columns} FROM {table} WHERE id = ? AND server_id = ?"
    return db.execute(query, (row_id, server_id)).fetchone()


def all_servers(db: Database) -> list[str]:
    """Returns the ids of all servers that are registered or own something."""
    owners = (f" UNION SELECT server_id FROM {table} WHERE server_id IS NOT NULL" for table in _TABLES)
    rows = db.execute("SELECT id FROM servers" + "".join(owners))
    return [row[0] for row in rows.fetchall() if row[0] != WAITING]


def _owns(db: Database, table: str, server_id: str) -> bool:
    return (
        db.execute(f"SELECT 1 FROM {table} WHERE server_id = ? LIMIT 1", (server_id,)).fetchone() is not None
    )
