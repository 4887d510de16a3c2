"""PostgreSQL as a response store that several servers share, through psycopg 3.

The tables of ``schema.py`` are in the database schema ``chorale``. Every write transaction takes the same
advisory lock, so writes are serialized as in SQLite: the same statements are correct on both, without
deadlocks or retries. Queued writes of a server share one commit.

Imported only for a URL of PostgreSQL. Raises ``ConfigError`` if psycopg is missing.
"""

from __future__ import annotations

import functools
import re
import select
import time
from collections.abc import Iterable, Sequence
from typing import Any

from chorale.errors import ConfigError, install_hint
from chorale.store.database.connection_thread import LOCK_SECONDS
from chorale.store.database.schema import create
from chorale.store.protocol import StoreError

try:
    import psycopg
    from psycopg.waiting import Ready, Wait
except ImportError:
    raise ConfigError(
        f"--response-store postgresql://... needs psycopg: {install_hint('postgres')}"
    ) from None

_LOCK = 0x63686F72616C65  # key of the writers' advisory lock: "chorale" in ASCII
_LOCK_NOT_AVAILABLE = "55P03"
_LEAST_SECONDS = 1.0  # minimum wait for an answer, even after the deadline
_CREATE_SECONDS = 30.0  # limit for creating the tables; another server may be doing it
_QUOTED = re.compile("[\"'].*[\"']")
_TYPES = {
    "SERIAL": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "INT": "BIGINT",
    "FLOAT": "DOUBLE PRECISION",
    "BYTES": "BYTEA",
}
_TRIGGER = """
CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {statements} RETURN NULL; END $$;
CREATE TRIGGER {name} AFTER {event} ON {table} FOR EACH ROW EXECUTE FUNCTION {name}();
"""


@functools.cache  # a few dozen statements
def _placeholders(sql: str) -> str:
    return sql.replace("?", "%s")


class PostgresDatabase(psycopg.Connection[Any]):
    """A ``Database`` on a connection of psycopg, which is closed if there is no answer by the time ``until``.

    PostgreSQL's own limits (``statement_timeout``) have no effect while its processes hang.
    """

    errors = psycopg.Error
    until = 0.0  # time.monotonic()

    def wait(self, gen: Any, *_: Any, **__: Any) -> Any:
        try:
            wanted = next(gen)
            while True:
                poll = select.poll()
                writes = select.POLLOUT if wanted & Wait.W else 0
                poll.register(self.pgconn.socket, writes | (select.POLLIN if wanted & Wait.R else 0))
                left = max(_LEAST_SECONDS, self.until - time.monotonic())
                if not (found := poll.poll(left * 1000)):
                    self.pgconn.finish()
                    raise psycopg.OperationalError("the database server did not answer in time")
                event = found[0][1]  # errors count as readable: the read raises them
                ready = (event & ~select.POLLOUT and Ready.R) | (event & select.POLLOUT and Ready.W)
                wanted = gen.send(Ready(ready))
        except StopIteration as stop:
            return stop.value

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        return super().execute(_placeholders(query), params or None, **options)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Any:
        cursor = self.cursor()
        cursor.executemany(_placeholders(sql), rows)
        return cursor

    def has_tables(self) -> bool:
        return bool(self.execute("SELECT to_regclass('chorale.schema_version') IS NOT NULL").fetchone()[0])

    def is_busy(self, error: Exception) -> bool:
        return getattr(error, "sqlstate", None) == _LOCK_NOT_AVAILABLE

    def begin(self, writes: bool, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.execute("BEGIN" if writes else "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        # The limit covers every lock of the transaction, also on rows and tables; 0 would mean no limit. It
        # is shorter than ``until``, which would close the connection.
        self.execute(f"SET LOCAL lock_timeout = {max(1, int(seconds * 900))}")
        if writes:
            self.execute("SELECT pg_advisory_xact_lock(?)", (_LOCK,))

    def give_back(self, num_evicted: int) -> bool:
        """Does nothing: PostgreSQL's autovacuum releases the space."""
        return False


def connect(conninfo: str, creating: bool) -> PostgresDatabase:
    """Opens a connection; creates the tables if ``creating``.

    Raises ``StoreError`` while the database cannot be reached, ``ConfigError`` if the tables have another
    format.
    """
    try:
        database = PostgresDatabase.connect(
            conninfo,
            autocommit=True,
            connect_timeout=2,  # minimum of psycopg
            tcp_user_timeout=10_000,  # ms; bounds the wait for an unreachable server
            application_name="chorale",
        )
        database.until = time.monotonic() + LOCK_SECONDS
        # A Chorale server that disappears during a write must not block the others for long.
        database.execute("SET idle_in_transaction_session_timeout = '60s'")
        database.execute("SET lock_timeout = '30s'")
        database.execute("SET statement_timeout = '60s'")
        if creating:
            _create(database)
        database.execute("SET search_path TO chorale")
    except psycopg.Error as error:
        raise StoreError(f"cannot open the response store: {_without_secrets(error)}") from error
    return database


def _create(database: PostgresDatabase) -> None:
    database.begin(writes=True, seconds=_CREATE_SECONDS)
    database.execute("CREATE SCHEMA IF NOT EXISTS chorale")
    database.execute("SET LOCAL search_path TO chorale")
    try:
        create(database, _TYPES, _TRIGGER)
    except ConfigError:
        database.rollback()
        database.close()
        raise
    database.commit()


def _without_secrets(error: Exception) -> str:
    """Returns libpq's message on one line, without quoted text unless it came from a database server.

    A database server's message contains host and user. Other messages quote parts of the URL, possibly the
    password.
    """
    message = " ".join(str(error).split())
    if "connection to server" not in message:
        message = _QUOTED.sub("...", message)
    return message[:500]
