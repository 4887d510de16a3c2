"""ConnectionThread: a thread that owns one database connection and runs operations for asyncio.

Queued write operations share one transaction, and so one fsync. Results are delivered after the commit. If
the shared transaction fails, each operation is retried alone, so that only the faulty ones fail. A broken
connection is reopened for the next operation.

Each operation has one deadline for all locks, measured from its arrival: time in the queue counts. After the
deadline an operation is still tried once, without waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from chorale.store.database.sql import Database
from chorale.store.protocol import NoSpaceError, StoreError

Result = TypeVar("Result")
Operation = Callable[[Database], Any]

MAX_GROUP = 64  # most operations per transaction
LOCK_SECONDS = 5.0  # time from an operation's arrival to its deadline
_BUSY_SECONDS = 0.01  # pause between attempts to get a lock
_RECONNECT_SECONDS = 1.0  # pause between attempts to open the database


@dataclass(slots=True)
class _Pending:
    operation: Operation
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    deadline: float  # time.monotonic()
    result: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class Refusal:
    """The last failure to open a database, shared by its connections."""

    error: StoreError | None = None
    at: float = 0.0  # time.monotonic()


class ConnectionThread:
    """``connect`` is first called before the thread starts, so a bad file or address fails at start-up.

    A full or read-only disk (``NoSpaceError``) is accepted: operations fail until the database can be opened.
    ``first``: runs once, before any other operation, as soon as the database is open. ``idle``: runs every
    ``idle_seconds`` while no operation is queued, and is repeated as long as it returns True.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Database],
        *,
        writes: bool,
        first: Operation | None = None,
        idle: Operation | None = None,
        idle_seconds: float = 60.0,
        lock_seconds: float = LOCK_SECONDS,
        refusal: Refusal | None = None,
    ) -> None:
        self._connect = connect
        self._connection: Database | None = None
        self._writes = writes
        self._first = first
        self._idle = idle
        self._idle_seconds = idle_seconds
        self._idle_at = time.monotonic() + idle_seconds if idle is not None else math.inf
        self._lock_seconds = lock_seconds
        self._refusal = refusal or Refusal()
        self.fault: str | None = None  # error of the last transaction; None if it succeeded
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()  # None: the end
        self._closed = False
        with contextlib.suppress(NoSpaceError):
            self._open()
            if first is not None:
                self._execute([])
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, operation: Callable[[Database], Result]) -> Result:
        """Runs an operation on the thread. Raises ``StoreError`` if the database fails."""
        if self._closed:
            raise StoreError("the response store is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._queue.put(_Pending(operation, loop, future, time.monotonic() + self._lock_seconds))
        return await future

    def close(self) -> None:
        """Finishes the queued operations, then closes the connection. Blocks. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        is_end = False
        while not is_end:
            group, is_end = self._next_group()
            if group:
                self._execute(group)
            elif not is_end:
                began = time.monotonic()
                is_more = self._run_idle()
                now = time.monotonic()
                # Pauses for as long as the idle operation took, so that other processes can write.
                self._idle_at = now + (now - began if is_more else self._idle_seconds)
        if self._connection is not None:
            self._connection.close()

    def _next_group(self) -> tuple[list[_Pending], bool]:
        """Returns operations that have arrived, and whether none follow."""
        group: list[_Pending] = []
        try:
            left = self._idle_at - time.monotonic()
            entry = self._queue.get(timeout=None if left == math.inf else max(0.0, left))
            while entry is not None:
                group.append(entry)
                if len(group) >= MAX_GROUP:
                    return group, False
                entry = self._queue.get_nowait()
        except queue.Empty:
            return group, False
        return group, True

    def _run_idle(self) -> bool:
        """Runs the idle operation and returns its result. Errors are ignored: the next write reports them."""
        if self._idle is None:
            return False
        try:
            connection = self._open()
        except StoreError:
            return False
        with contextlib.suppress(StoreError, connection.errors):
            try:
                return bool(self._idle(connection))
            finally:
                connection.rollback()
        return False

    def _execute(self, group: list[_Pending]) -> None:
        """Runs the operations and sets their results or errors. While another process has a lock, operations
        are retried until their deadline."""
        while waiting := self._attempt(group):
            group = waiting
            time.sleep(_BUSY_SECONDS)  # some locks are refused without waiting

    def _attempt(self, group: list[_Pending], reconnected: bool = False) -> list[_Pending]:
        """Runs the operations in one transaction. Returns those to be retried."""
        try:
            connection = self._open()
        except StoreError as error:
            self._failed(group, error)
            return []
        deadline = min((pending.deadline for pending in group), default=time.monotonic() + self._lock_seconds)
        try:
            self._transaction(connection, group, max(0.0, deadline - time.monotonic()))
        except connection.errors as error:
            if connection.is_busy(error):
                return self._still_in_time(group)
            if connection.broken and not reconnected and deadline > time.monotonic():
                return self._attempt(group, reconnected=True)
            failure = StoreError(f"the response store failed: {error}")
            if connection.broken:  # queued operations fail immediately
                self._refusal.error, self._refusal.at = failure, time.monotonic()
            if len(group) < 2:
                self._failed(group, failure)
                return []
        except Exception as error:
            if len(group) < 2:
                _give_up(group, error)
                return []
        else:
            self.fault = None
            _resolve(group)
            return []
        for pending in group:  # one operation failed the whole transaction
            self._execute([pending])
        return []

    def _still_in_time(self, group: list[_Pending]) -> list[_Pending]:
        """Fails the operations whose deadline has passed, and returns the others."""
        now = time.monotonic()
        late = [pending for pending in group if pending.deadline <= now]
        self._failed(late, StoreError("the response store is locked by another process"))
        return [pending for pending in group if pending.deadline > now]

    def _transaction(self, connection: Database, group: list[_Pending], seconds: float) -> None:
        try:
            connection.begin(self._writes, seconds)
            if self._first is not None:
                self._first(connection)
            for pending in group:
                pending.result = pending.operation(connection)
            connection.commit()
            self._first = None
        except BaseException:
            with contextlib.suppress(connection.errors):
                connection.rollback()
            raise

    def _failed(self, group: list[_Pending], error: StoreError) -> None:
        """Fails the operations with the database's error and keeps its message in ``fault``."""
        self.fault = error.message
        _give_up(group, error)

    def _open(self) -> Database:
        """Returns the connection, opening it if necessary. Raises ``StoreError`` while the database cannot be
        reached; calls shortly after a failed attempt raise its error again without another attempt."""
        if self._connection is not None and not self._connection.broken:
            return self._connection
        last = self._refusal.error
        if last is not None and time.monotonic() - self._refusal.at < _RECONNECT_SECONDS:
            raise type(last)(last.message)
        try:
            self._connection = self._connect()
        except StoreError as error:
            self._refusal.error, self._refusal.at = error, time.monotonic()
            self.fault = error.message
            raise
        self._refusal.error = None
        return self._connection


def _give_up(group: list[_Pending], error: Exception) -> None:
    for pending in group:
        # One exception per operation: a shared one would collect the tracebacks of all tasks that raise it.
        pending.error = StoreError(error.message) if isinstance(error, StoreError) else error
    _resolve(group)


def _resolve(group: list[_Pending]) -> None:
    """Resolves the futures, with one wake-up per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Pending]] = {}
    for pending in group:
        by_loop.setdefault(pending.loop, []).append(pending)
    for loop, members in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, members)
        except RuntimeError:
            pass  # the loop is closed: nobody waits for the results


def _settle(group: list[_Pending]) -> None:
    for pending in group:
        future = pending.future
        if future.done():  # the waiter was cancelled; the operation was still run
            continue
        if pending.error is None:
            future.set_result(pending.result)
        else:
            future.set_exception(pending.error)
