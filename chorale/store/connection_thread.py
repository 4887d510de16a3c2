"""One thread that owns one database connection: jobs in, asyncio results out.

Write jobs that wait together share one transaction, so a busy server pays one fsync for many responses. A
job is acknowledged only after the commit. If the shared transaction fails, each job is tried alone, so that
only the faulty ones fail. A connection that broke is opened anew for the next job.

Each job has one deadline for all the locks that it waits for, counted from its arrival: the time that it
spends behind other jobs is part of it. A job whose deadline has passed is still tried once, without waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from chorale.store.database import Database
from chorale.store.protocol import NoSpaceError, StoreError

Result = TypeVar("Result")
Job = Callable[[Database], Any]

MAX_GROUP = 64
LOCK_SECONDS = 5.0  # a job's deadline
_BUSY_SECONDS = 0.01
_RECONNECT_SECONDS = 1.0  # between attempts to open a database that cannot be opened


@dataclass(slots=True)
class _Pending:
    job: Job
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    deadline: float  # of time.monotonic()
    result: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class _Stop:
    done: threading.Event = field(default_factory=threading.Event)


class ConnectionThread:
    """``connect`` runs here, before the thread starts, so that a bad file or address fails at start-up.

    A full or read-only disk (``NoSpaceError``) is accepted: jobs fail until the database can be opened.
    ``first``: a job that runs once, before any other, as soon as the database can be opened.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Database],
        *,
        writes: bool,
        first: Job | None = None,
        idle: Job | None = None,
        idle_seconds: float = 60.0,
        lock_seconds: float = LOCK_SECONDS,
    ) -> None:
        self._connect = connect
        self._connection: Database | None = None
        self._writes = writes
        self._first = first
        self._idle = idle
        self._idle_seconds = idle_seconds
        self._lock_seconds = lock_seconds
        self._refused: tuple[float, str] | None = None  # when opening failed last, and how
        self.fault: str | None = None  # why the last transaction failed; None while they succeed
        self._queue: queue.SimpleQueue[_Pending | _Stop] = queue.SimpleQueue()
        self._closed = False
        with contextlib.suppress(NoSpaceError):
            self._open()
            if first is not None:
                self._execute([])
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[Database], Result]) -> Result:
        """Run a job on the thread. Raises ``StoreError`` for what the database refuses."""
        if self._closed:
            raise StoreError("the response store is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._queue.put(_Pending(job, loop, future, time.monotonic() + self._lock_seconds))
        return await future

    def close(self) -> None:
        """Finish what is queued, then close the connection. Idempotent; blocks for that long."""
        if self._closed:
            return
        self._closed = True
        stop = _Stop()
        self._queue.put(stop)
        stop.done.wait()
        self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            group, stop = self._next_group()
            if group:
                self._execute(group)
            elif stop is None:
                self._run_idle()
            if stop is not None:
                if self._connection is not None:
                    self._connection.close()
                stop.done.set()
                return

    def _next_group(self) -> tuple[list[_Pending], _Stop | None]:
        group: list[_Pending] = []
        try:
            entry = self._queue.get(timeout=self._idle_seconds if self._idle is not None else None)
            while True:
                if isinstance(entry, _Stop):
                    return group, entry
                group.append(entry)
                if len(group) >= MAX_GROUP:
                    return group, None
                entry = self._queue.get_nowait()
        except queue.Empty:
            return group, None

    def _run_idle(self) -> None:
        """Run the housekeeping job. Its errors are dropped; the next write reports them."""
        if self._idle is None:
            return
        try:
            connection = self._open()
        except StoreError:
            return
        with contextlib.suppress(StoreError, connection.errors):
            try:
                self._idle(connection)
            finally:
                connection.rollback()

    def _execute(self, group: list[_Pending]) -> None:
        """Do the jobs, and hand their results or errors back. Jobs whose deadline has not passed are retried
        while a lock is not free."""
        while waiting := self._attempt(group):
            group = waiting
            time.sleep(_BUSY_SECONDS)  # some locks are refused without a wait

    def _attempt(self, group: list[_Pending], reconnected: bool = False) -> list[_Pending]:
        """Do the jobs in one transaction; returns those that are to be tried again."""
        try:
            connection = self._open()
        except StoreError as error:
            self._failed(group, error)
            return []
        deadline = min((pending.deadline for pending in group), default=self._soon())
        try:
            self._transaction(connection, group, max(0.0, deadline - time.monotonic()))
        except connection.errors as error:
            if connection.is_busy(error):
                return self._still_in_time(group)
            if connection.broken and not reconnected:
                return self._attempt(group, reconnected=True)
            if len(group) < 2:
                self._failed(group, StoreError(f"the response store failed: {error}"))
                return []
        except Exception as error:
            if len(group) < 2:
                _give_up(group, error)
                return []
        else:
            self.fault = None
            _resolve(group)
            return []
        for pending in group:  # one of them failed, and all with it
            self._execute([pending])
        return []

    def _still_in_time(self, group: list[_Pending]) -> list[_Pending]:
        """A lock was not free: fail the jobs whose deadline has passed, and return the others."""
        now = time.monotonic()
        late = [pending for pending in group if pending.deadline <= now]
        self._failed(late, StoreError("the response store is locked by another process"))
        return [pending for pending in group if pending.deadline > now]

    def _soon(self) -> float:
        return time.monotonic() + self._lock_seconds

    def _transaction(self, connection: Database, group: list[_Pending], seconds: float) -> None:
        try:
            connection.begin(self._writes, seconds)
            if self._first is not None:
                self._first(connection)
            for pending in group:
                pending.result = pending.job(connection)
            connection.commit()
            self._first = None
        except BaseException:
            with contextlib.suppress(connection.errors):
                connection.rollback()
            raise

    def _failed(self, group: list[_Pending], error: StoreError) -> None:
        """Fail the jobs with the database's error, and keep its message in ``fault``."""
        self.fault = error.message
        _give_up(group, error)

    def _open(self) -> Database:
        """The connection. Raises ``StoreError`` while the database cannot be reached, without a queue of
        attempts: those that come shortly after a failed one share its error."""
        if self._connection is not None and not self._connection.broken:
            return self._connection
        if self._refused is not None and time.monotonic() - self._refused[0] < _RECONNECT_SECONDS:
            raise StoreError(self._refused[1])
        try:
            self._connection = self._connect()
        except StoreError as error:
            self._refused = time.monotonic(), error.message
            self.fault = error.message
            raise
        self._refused = None
        return self._connection


def _give_up(group: list[_Pending], error: Exception) -> None:
    for pending in group:
        # One exception each: raised in several tasks, one would collect the tracebacks of all.
        pending.error = StoreError(error.message) if isinstance(error, StoreError) else error
    _resolve(group)


def _resolve(group: list[_Pending]) -> None:
    """Hand the results back: one wake-up for each event loop, not one for each job."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Pending]] = {}
    for pending in group:
        by_loop.setdefault(pending.loop, []).append(pending)
    for loop, members in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, members)
        except RuntimeError:
            pass  # that loop has ended, and its waiters with it


def _settle(group: list[_Pending]) -> None:
    for pending in group:
        future = pending.future
        if future.done():  # the waiter was cancelled; the work is done all the same
            continue
        if pending.error is None:
            future.set_result(pending.result)
        else:
            future.set_exception(pending.error)
