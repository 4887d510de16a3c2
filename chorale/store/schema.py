"""The tables of the response store for SQLite and PostgreSQL, and the migration of older stores.

``responses`` has a row per response, ``items`` a row per input or output item with its token ids, ``events``
the compressed log of background responses. ``server_id`` is the server process that runs a response, NULL
once it has ended; ``servers`` holds the heartbeats. ``conversation_items`` holds the items of conversations,
whose ``lease`` is the token of the request that may append. Triggers keep ``totals``, so that checking a
bound is free. ``request`` is the data for resuming a response, NULL if it may not be resumed; ``attempts``
counts its starts. ``used`` is when a response was written or last continued: eviction removes the least
recently used first.

``files`` has a row per file (see ``files``), ``batches`` a row per batch and ``batch_results`` the answered
lines of the batches that have not ended (see ``batches``).

A migration compares: old names are replaced, then missing tables and columns are added. A new column
therefore needs a default. Increase ``VERSION`` with every change.
"""

from __future__ import annotations

from collections.abc import Mapping

from chorale.errors import ConfigError
from chorale.store.database import Database

VERSION = 5  # 4: ``events`` holds output events instead of rendered ones; new names. 5: files and batches

_COUNT = "INT NOT NULL DEFAULT 0"
# Table to its columns, then constraints. The databases' modules map the types that differ.
TABLES: dict[str, dict[str, str]] = {
    "responses": {
        "seq": "SERIAL", "id": "TEXT NOT NULL UNIQUE", "owner": "BYTES NOT NULL", "previous_id": "TEXT",
        "created": "FLOAT NOT NULL", "used": "FLOAT NOT NULL", "status": "TEXT NOT NULL",
        "body": "BYTES NOT NULL", "num_bytes": "INT NOT NULL", "server_id": "TEXT", "num_events": _COUNT,
        "conversation_id": "TEXT", "conversation_end": _COUNT, "request": "BYTES",
        "attempts": "INT NOT NULL DEFAULT 1",
    },
    "items": {
        "response_seq": "INT NOT NULL REFERENCES responses (seq) ON DELETE CASCADE",
        "position": "INT NOT NULL", "is_output": "INT NOT NULL", "id": "TEXT", "item": "BYTES NOT NULL",
        "token_ids": "BYTES NOT NULL", "PRIMARY KEY": "(response_seq, position)",
    },
    "events": {
        "response_seq": "INT NOT NULL REFERENCES responses (seq) ON DELETE CASCADE",
        "first": "INT NOT NULL", "num_events": "INT NOT NULL", "data": "BYTES NOT NULL",
        "PRIMARY KEY": "(response_seq, first)",
    },
    "servers": {"id": "TEXT NOT NULL", "beat": "INT NOT NULL", "PRIMARY KEY": "(id)"},
    "conversations": {
        "seq": "SERIAL", "id": "TEXT NOT NULL UNIQUE", "owner": "BYTES NOT NULL",
        "created": "FLOAT NOT NULL", "used": "FLOAT NOT NULL", "metadata": "BYTES NOT NULL",
        "next_position": "INT NOT NULL", "lease": "TEXT", "server_id": "TEXT", "num_bytes": "INT NOT NULL",
    },
    "conversation_items": {
        "conversation_seq": "INT NOT NULL REFERENCES conversations (seq) ON DELETE CASCADE",
        "position": "INT NOT NULL", "id": "TEXT NOT NULL", "item": "BYTES NOT NULL",
        "token_ids": "BYTES NOT NULL", "PRIMARY KEY": "(conversation_seq, position)",
    },
    "files": {
        "seq": "SERIAL", "id": "TEXT NOT NULL UNIQUE", "owner": "BYTES NOT NULL", "state": "TEXT NOT NULL",
        "created": "FLOAT NOT NULL", "expires": "FLOAT", "purpose": "TEXT NOT NULL",
        "filename": "TEXT NOT NULL", "num_bytes": "INT NOT NULL", "server_id": "TEXT",
    },
    "batches": {
        "seq": "SERIAL", "id": "TEXT NOT NULL UNIQUE", "owner": "BYTES NOT NULL", "status": "TEXT NOT NULL",
        "created": "FLOAT NOT NULL", "expires": "FLOAT NOT NULL", "ended": "FLOAT",
        "served_model": "TEXT NOT NULL", "input_file_id": "TEXT NOT NULL", "body": "BYTES NOT NULL",
        "server_id": "TEXT", "attempts": _COUNT,
        "num_lines": _COUNT, "num_completed": _COUNT, "num_failed": _COUNT, "input_tokens": _COUNT,
        "cached_tokens": _COUNT, "output_tokens": _COUNT, "reasoning_tokens": _COUNT,
    },
    "batch_results": {
        "batch_seq": "INT NOT NULL REFERENCES batches (seq) ON DELETE CASCADE", "line": "INT NOT NULL",
        "completed": "INT NOT NULL", "data": "BYTES NOT NULL", "PRIMARY KEY": "(batch_seq, line)",
    },
    "totals": {"num_responses": _COUNT, "num_bytes": _COUNT, "num_conversations": _COUNT},
    "schema_version": {"version": "INT NOT NULL"},
}  # fmt: skip
COUNTED = ("responses", "conversations")  # tables counted in ``totals``
_INDEXES = (
    "INDEX IF NOT EXISTS responses_used ON responses (used, seq)",
    "INDEX IF NOT EXISTS responses_server ON responses (server_id) WHERE server_id IS NOT NULL",
    "INDEX IF NOT EXISTS items_id ON items (id) WHERE id IS NOT NULL",
    "INDEX IF NOT EXISTS conversations_used ON conversations (used, seq)",
    "INDEX IF NOT EXISTS conversations_server ON conversations (server_id) WHERE server_id IS NOT NULL",
    "INDEX IF NOT EXISTS files_owner ON files (owner, seq)",
    "INDEX IF NOT EXISTS files_server ON files (server_id) WHERE server_id IS NOT NULL",
    "INDEX IF NOT EXISTS batches_owner ON batches (owner, seq)",
    "INDEX IF NOT EXISTS batches_server ON batches (server_id) WHERE server_id IS NOT NULL",
    "INDEX IF NOT EXISTS batches_input ON batches (input_file_id) WHERE ended IS NULL",
    "UNIQUE INDEX IF NOT EXISTS conversation_items_id ON conversation_items (id, conversation_seq)",
)
# Names up to format 3, of tables and of columns.
_OLD_TABLES = {"workers": "servers"}
_OLD_COLUMNS = {
    "responses": {"worker": "server_id"},
    "conversations": {"worker": "server_id", "locked": "lease"},
}
_OLD_INDEXES = ("responses_worker", "conversations_worker", "responses_used", "conversations_used")


def migrate(db: Database, found: int, types: Mapping[str, str], suffix: str) -> None:
    """Migrates the tables to ``VERSION``, in the caller's transaction. The caller adds the triggers
    afterwards.

    ``found``: the format of the store, 0 without tables. ``types``: the database's names of column types.
    ``suffix``: for tables with a primary key of two columns. Raises ``ConfigError`` for a newer format."""
    if found > VERSION:
        raise ConfigError(f"the response store has format {found}; this release knows up to {VERSION}")
    if 0 < found < 4:
        _rename(db)
    for table, columns in TABLES.items():
        known = db.columns(table)
        if not known:
            db.execute(f"CREATE TABLE {table} ({_columns(columns, types)}){_suffix(columns, suffix)}")
        for name in columns.keys() - known - {"PRIMARY KEY"} if known else ():
            db.execute(f"ALTER TABLE {table} ADD COLUMN {_columns({name: columns[name]}, types)}")
    for index in _INDEXES:
        db.execute(f"CREATE {index}")
    if found == 0:
        db.execute("INSERT INTO totals VALUES (0, 0, 0)")
    elif found < 4:
        _empty_waiting(db)
    db.execute("DELETE FROM schema_version")
    db.execute("INSERT INTO schema_version VALUES (?)", (VERSION,))


def version(db: Database) -> int:
    """Returns the format of the store; 0 without tables."""
    if not db.columns("schema_version"):
        return 0
    row = db.execute("SELECT version FROM schema_version").fetchone()
    return int(row[0]) if row is not None else 0


def _rename(db: Database) -> None:
    for index in _OLD_INDEXES:
        db.execute(f"DROP INDEX IF EXISTS {index}")
    for old, new in _OLD_TABLES.items():
        if db.columns(old):
            db.execute(f"ALTER TABLE {old} RENAME TO {new}")
    for table, names in _OLD_COLUMNS.items():
        known = db.columns(table)
        for old, new in names.items():
            if old in known:
                db.execute(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")


def _empty_waiting(db: Database) -> None:
    """Deletes the events of waiting responses, which format 3 kept in rendered form."""
    for seq, size in db.execute(
        "SELECT seq, SUM(length(data) + 64) FROM responses JOIN events ON response_seq = seq"
        " WHERE server_id = 'waiting' GROUP BY seq"
    ).fetchall():
        db.execute("DELETE FROM events WHERE response_seq = ?", (seq,))
        db.execute(
            "UPDATE responses SET num_events = 0, num_bytes = num_bytes - ? WHERE seq = ?", (int(size), seq)
        )


def _columns(columns: Mapping[str, str], types: Mapping[str, str]) -> str:
    made = []
    for name, declared in columns.items():
        kind, _, rest = declared.partition(" ")
        made.append(f"{name} {types.get(kind, kind)} {rest}")
    return ", ".join(made)


def _suffix(columns: Mapping[str, str], suffix: str) -> str:
    return suffix if "PRIMARY KEY" in columns else ""
