"""The tables of the response store for SQLite and PostgreSQL.

``responses`` has a row per response, ``items`` a row per input or output item with its token ids, ``events``
the compressed log of background responses. ``server_id`` is the server process that runs a response, NULL
once it has ended; ``servers`` counts heartbeats. ``conversation_items`` has the items of conversations; the
``lease`` of a conversation is the token of the request that may append. Triggers update ``totals`` and
``file_totals``, so checking a bound reads one row. ``request`` is the data for resuming a response, NULL if
it may not be resumed; ``attempts`` counts the servers that died while they ran it. ``used`` is the time when
a row was written or last continued; rows are evicted in LRU order.

``files`` has a row per file (see ``files``), ``file_totals`` one per owner of files. ``batches`` has a row
per batch and ``batch_results`` the answered lines of batches whose ``has_results`` is 1 (see ``batches``).

Increase ``VERSION`` with every change of the tables: a store of another version is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from chorale.errors import ConfigError
from chorale.store.database.sql import Database

VERSION = 7
_REMEDY = "move it away, or name another with --response-store"

_COUNT = "INT NOT NULL DEFAULT 0"
# Columns and constraints of each table. ``sqlite`` and ``postgres`` map the types that differ.
TABLES: dict[str, dict[str, str]] = {
    "responses": {
        "seq": "SERIAL", "id": "TEXT NOT NULL UNIQUE", "owner": "BYTES NOT NULL", "previous_id": "TEXT",
        "created": "FLOAT NOT NULL", "used": "FLOAT NOT NULL", "status": "TEXT NOT NULL",
        "body": "BYTES NOT NULL", "num_bytes": "INT NOT NULL", "server_id": "TEXT", "num_events": _COUNT,
        "conversation_id": "TEXT", "conversation_end": _COUNT, "request": "BYTES",
        "attempts": _COUNT,
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
        "server_id": "TEXT", "attempts": _COUNT, "has_results": "INT NOT NULL DEFAULT 1",
        "num_lines": _COUNT, "num_completed": _COUNT, "num_failed": _COUNT, "input_tokens": _COUNT,
        "cached_tokens": _COUNT, "output_tokens": _COUNT, "reasoning_tokens": _COUNT,
    },
    "batch_results": {
        "batch_seq": "INT NOT NULL REFERENCES batches (seq) ON DELETE CASCADE", "line": "INT NOT NULL",
        "completed": "INT NOT NULL", "data": "BYTES NOT NULL", "PRIMARY KEY": "(batch_seq, line)",
    },
    "file_totals": {
        "owner": "BYTES NOT NULL", "num_files": "INT NOT NULL", "num_bytes": "INT NOT NULL",
        "PRIMARY KEY": "(owner)",
    },
    "totals": {"num_responses": _COUNT, "num_bytes": _COUNT, "num_conversations": _COUNT},
    "schema_version": {"version": "INT NOT NULL"},
}  # fmt: skip
_ADD = "INSERT INTO file_totals VALUES (NEW.owner, 1, NEW.num_bytes) ON CONFLICT (owner) DO UPDATE"
_IS_KEPT = "CASE WHEN {row}.state = 'gone' THEN 0 ELSE 1 END"
_TAKE = "UPDATE file_totals SET num_files = num_files - " + _IS_KEPT.format(row="OLD")
# Trigger statements by event. ``{table}``: responses or conversations.
_COUNTED = {
    "INSERT": "UPDATE totals SET num_{table} = num_{table} + 1, num_bytes = num_bytes + NEW.num_bytes;",
    "DELETE": "UPDATE totals SET num_{table} = num_{table} - 1, num_bytes = num_bytes - OLD.num_bytes;",
    "UPDATE OF num_bytes": "UPDATE totals SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes;",
}
_TRIGGERS = {
    (event, table): statement.format(table=table)
    for table in ("responses", "conversations")
    for event, statement in _COUNTED.items()
} | {
    ("INSERT", "files"): f"{_ADD} SET num_files = file_totals.num_files + 1,"
    " num_bytes = file_totals.num_bytes + excluded.num_bytes;",
    ("DELETE", "files"): f"{_TAKE}, num_bytes = num_bytes - OLD.num_bytes WHERE owner = OLD.owner;"
    " DELETE FROM file_totals WHERE owner = OLD.owner AND num_files = 0;",
    ("UPDATE OF state, num_bytes", "files"): f"{_TAKE} + {_IS_KEPT.format(row='NEW')},"
    " num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes WHERE owner = OLD.owner;",
}
_INDEXES = (
    "INDEX responses_used ON responses (used, seq)",
    "INDEX responses_server ON responses (server_id) WHERE server_id IS NOT NULL",
    "INDEX items_id ON items (id) WHERE id IS NOT NULL",
    "INDEX conversations_used ON conversations (used, seq)",
    "INDEX conversations_server ON conversations (server_id) WHERE server_id IS NOT NULL",
    "INDEX files_owner ON files (owner, seq)",
    "INDEX files_purpose ON files (owner, purpose, seq)",
    "INDEX files_expires ON files (expires) WHERE state = 'ready'",
    "INDEX files_gone ON files (seq) WHERE state = 'gone'",
    "INDEX files_server ON files (server_id) WHERE server_id IS NOT NULL",
    "INDEX batches_owner ON batches (owner, seq)",
    "INDEX batches_server ON batches (server_id) WHERE server_id IS NOT NULL",
    "INDEX batches_input ON batches (input_file_id) WHERE ended IS NULL",
    "INDEX batches_ended ON batches (ended) WHERE ended IS NOT NULL",
    "INDEX batches_results ON batches (seq) WHERE ended IS NOT NULL AND has_results = 1",
    "UNIQUE INDEX conversation_items_id ON conversation_items (id, conversation_seq)",
)


def create(db: Database, types: Mapping[str, str], trigger: str, suffix: str = "") -> None:
    """Creates the tables and their triggers in the caller's transaction, unless they exist.

    ``types``: the database's names of column types. ``trigger``: its statement for a trigger. ``suffix``: end
    of the statements of tables with PRIMARY KEY clauses. Raises ``ConfigError`` if the tables have another
    format.
    """
    if db.has_tables():
        check_format(db.execute("SELECT version FROM schema_version").fetchone()[0])
        return
    for table, columns in TABLES.items():
        db.execute(f"CREATE TABLE {table} ({_columns(columns, types)}){_suffix(columns, suffix)}")
    for index in _INDEXES:
        db.execute(f"CREATE {index}")
    db.execute("INSERT INTO totals VALUES (0, 0, 0)")
    db.execute("INSERT INTO schema_version VALUES (?)", (VERSION,))
    for number, ((event, table), statements) in enumerate(_TRIGGERS.items()):
        name = f"{table}_{number}"
        db.execute(trigger.format(name=name, event=event, table=table, statements=statements))


def check_format(found: int, name: str = "the response store") -> None:
    """Raises ``ConfigError`` for a store of another format."""
    if found != VERSION:
        raise ConfigError(f"{name} has format {found}, and this release uses {VERSION}: {_REMEDY}")


def _columns(columns: Mapping[str, str], types: Mapping[str, str]) -> str:
    made = []
    for name, declared in columns.items():
        kind, _, rest = declared.partition(" ")
        made.append(f"{name} {types.get(kind, kind)} {rest}")
    return ", ".join(made)


def _suffix(columns: Mapping[str, str], suffix: str) -> str:
    return suffix if "PRIMARY KEY" in columns else ""
