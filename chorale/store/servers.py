"""Statements on server processes: their heartbeats, and what they own.

A server is registered before it owns anything. ``background`` has its heartbeat and its expiry.
"""

from __future__ import annotations

from chorale.store.database.sql import Database

WAITING = "waiting"  # the ``server_id`` of what waits for a server
# Tables with a column ``server_id``, besides the responses.
_OWNING = ("conversations", "files", "batches")


def register(db: Database, server_id: str) -> None:
    """Registers the server before it owns anything."""
    db.execute("INSERT INTO servers (id, beat) VALUES (?, 0) ON CONFLICT (id) DO NOTHING", (server_id,))


def owns_more(db: Database, server_id: str) -> bool:
    """Returns whether the server owns anything but responses."""
    return any(
        db.execute(f"SELECT 1 FROM {table} WHERE server_id = ? LIMIT 1", (server_id,)).fetchone() is not None
        for table in _OWNING
    )


def beats(db: Database) -> dict[str, int]:
    """Returns the number of heartbeats of every registered server."""
    return dict(db.execute("SELECT id, beat FROM servers").fetchall())


def all_servers(db: Database) -> list[str]:
    """Returns the ids of all servers that are registered or own something."""
    owners = (
        f" UNION SELECT server_id FROM {table} WHERE server_id IS NOT NULL"
        for table in ("responses", *_OWNING)
    )
    rows = db.execute("SELECT id FROM servers" + "".join(owners))
    return [row[0] for row in rows.fetchall() if row[0] != WAITING]
