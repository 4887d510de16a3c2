"""The tables of the response store in SQLite, and how an older file becomes a newer one.

``responses`` holds one row a response, ``items`` one row an input or output item with its token ids,
``events`` the stream of a background response in compressed pieces. ``worker`` is the server process that
a response is running in, NULL once it has ended; ``workers`` holds their heartbeats. A conversation has its
items in ``conversation_items``; ``locked`` is the token of the request that may change it. The totals are
kept by triggers, so the bounds are exact with several server processes on one file, and cost no scan.
``request`` is the body of a background response that may be begun again after a crash, NULL once it may not;
``attempts`` counts how often it was begun.
``used`` is when a response was written or last continued: eviction takes the longest unused first.
"""

from __future__ import annotations

import sqlite3

from chorale.errors import ConfigError

_VERSION_1 = """
CREATE TABLE responses (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner BLOB NOT NULL,
    previous_id TEXT,
    created REAL NOT NULL,
    used REAL NOT NULL,
    status TEXT NOT NULL,
    body BLOB NOT NULL,
    num_bytes INTEGER NOT NULL
);
CREATE INDEX responses_used ON responses (used);
CREATE TABLE items (
    response_seq INTEGER NOT NULL REFERENCES responses (seq) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    is_output INTEGER NOT NULL,
    id TEXT,
    item BLOB NOT NULL,
    token_ids BLOB NOT NULL,
    PRIMARY KEY (response_seq, position)
) WITHOUT ROWID;
CREATE INDEX items_id ON items (id) WHERE id IS NOT NULL;
CREATE TABLE totals (num_responses INTEGER NOT NULL, num_bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER responses_added AFTER INSERT ON responses BEGIN
    UPDATE totals SET num_responses = num_responses + 1, num_bytes = num_bytes + NEW.num_bytes;
END;
CREATE TRIGGER responses_removed AFTER DELETE ON responses BEGIN
    UPDATE totals SET num_responses = num_responses - 1, num_bytes = num_bytes - OLD.num_bytes;
END;
"""

_VERSION_2 = """
ALTER TABLE responses ADD COLUMN worker TEXT;
ALTER TABLE responses ADD COLUMN num_events INTEGER NOT NULL DEFAULT 0;
ALTER TABLE responses ADD COLUMN conversation_id TEXT;
ALTER TABLE responses ADD COLUMN conversation_end INTEGER NOT NULL DEFAULT 0;
CREATE INDEX responses_worker ON responses (worker) WHERE worker IS NOT NULL;
CREATE TABLE events (
    response_seq INTEGER NOT NULL REFERENCES responses (seq) ON DELETE CASCADE,
    first INTEGER NOT NULL,
    num_events INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (response_seq, first)
) WITHOUT ROWID;
CREATE TABLE workers (id TEXT PRIMARY KEY, beat INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE conversations (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner BLOB NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL,
    metadata BLOB NOT NULL,
    next_position INTEGER NOT NULL,
    locked TEXT,
    worker TEXT,
    num_bytes INTEGER NOT NULL
);
CREATE INDEX conversations_used ON conversations (used);
CREATE INDEX conversations_worker ON conversations (worker) WHERE worker IS NOT NULL;
CREATE TABLE conversation_items (
    conversation_seq INTEGER NOT NULL REFERENCES conversations (seq) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    id TEXT NOT NULL,
    item BLOB NOT NULL,
    token_ids BLOB NOT NULL,
    PRIMARY KEY (conversation_seq, position)
) WITHOUT ROWID;
CREATE UNIQUE INDEX conversation_items_id ON conversation_items (id, conversation_seq);
ALTER TABLE totals ADD COLUMN num_conversations INTEGER NOT NULL DEFAULT 0;
CREATE TRIGGER responses_resized AFTER UPDATE OF num_bytes ON responses BEGIN
    UPDATE totals SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes;
END;
CREATE TRIGGER conversations_added AFTER INSERT ON conversations BEGIN
    UPDATE totals SET num_conversations = num_conversations + 1, num_bytes = num_bytes + NEW.num_bytes;
END;
CREATE TRIGGER conversations_removed AFTER DELETE ON conversations BEGIN
    UPDATE totals SET num_conversations = num_conversations - 1, num_bytes = num_bytes - OLD.num_bytes;
END;
CREATE TRIGGER conversations_resized AFTER UPDATE OF num_bytes ON conversations BEGIN
    UPDATE totals SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes;
END;
"""

_VERSION_3 = """
ALTER TABLE responses ADD COLUMN request BLOB;
ALTER TABLE responses ADD COLUMN attempts INTEGER NOT NULL DEFAULT 1;
"""

# Entry i brings a file from version i to i + 1. Only ever append: files in the field have run the others.
MIGRATIONS: tuple[str, ...] = (_VERSION_1, _VERSION_2, _VERSION_3)


def migrate(connection: sqlite3.Connection) -> None:
    """Create the tables or bring them up to date. Raises ``ConfigError`` for a file from a newer release."""
    if _version(connection) == len(MIGRATIONS):
        return  # nothing is written: the disk may be full
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)")
    row = connection.execute("SELECT version FROM schema_version").fetchone()
    version = int(row[0]) if row is not None else 0
    if version > len(MIGRATIONS):
        connection.execute("ROLLBACK")
        raise ConfigError(
            f"the response store has format {version}; this release knows up to {len(MIGRATIONS)}"
        )
    for script in MIGRATIONS[version:]:
        for statement in _statements(script):
            connection.execute(statement)
    connection.execute("DELETE FROM schema_version")
    connection.execute("INSERT INTO schema_version VALUES (?)", (len(MIGRATIONS),))
    connection.execute("COMMIT")


def _version(connection: sqlite3.Connection) -> int:
    """0 for a file without tables."""
    table = "SELECT 1 FROM sqlite_master WHERE name = 'schema_version'"
    if connection.execute(table).fetchone() is None:
        return 0
    row = connection.execute("SELECT version FROM schema_version").fetchone()
    return int(row[0]) if row is not None else 0


def _statements(script: str) -> list[str]:
    """Split a script: ``executescript`` would commit, and a migration must be all or nothing."""
    statements, current = [], ""
    for line in script.splitlines(keepends=True):
        current += line
        if sqlite3.complete_statement(current):
            statements.append(current.strip())
            current = ""
    return [statement for statement in statements if statement]
