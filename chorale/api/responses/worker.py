"""One thread that owns one SQLite connection: jobs in, asyncio results out.

Write jobs that wait together share one transaction, so a busy server pays one fsync for many responses. A
job is acknowledged only after the commit. If the shared transaction fails, each job is tried alone, so that
only the faulty ones fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from chorale.api.responses.stored import StoreError

Result = TypeVar("Result")
Job = Callable[[sqlite3.Connection], Any]

MAX_GROUP = 64


@dataclass(slots=True)
class _Pending:
    job: Job
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class _Stop:
    done: threading.Event = field(default_factory=threading.Event)


class SqliteWorker:
    """``connect`` runs here, before the thread starts, so that a bad file fails at start-up."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], sqlite3.Connection],
        *,
        writes: bool,
        idle: Job | None = None,
        idle_seconds: float = 60.0,
    ) -> None:
        self._connection = connect()
        self._writes = writes
        self._idle = idle
        self._idle_seconds = idle_seconds
        self._queue: queue.SimpleQueue[_Pending | _Stop] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run a job on the thread. Raises ``StoreError`` for what SQLite refuses."""
        if self._closed:
            raise StoreError("the response store is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._queue.put(_Pending(job, loop, future))
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
                _resolve(group)
            elif stop is None:
                self._run_idle()
            if stop is not None:
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
        if self._idle is None:
            return
        try:
            self._idle(self._connection)
        except sqlite3.Error:
            # Housekeeping: it is tried again, and a put that fails for the same reason says so.
            with contextlib.suppress(sqlite3.Error):  # the thread must live: requests wait for it
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def _execute(self, group: list[_Pending]) -> None:
        if not self._writes:
            for pending in group:
                self._attempt(pending)
            return
        try:
            self._transaction(group)
        except Exception:
            for pending in group:
                self._alone(pending)

    def _transaction(self, group: list[_Pending]) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for pending in group:
                pending.result = pending.job(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _alone(self, pending: _Pending) -> None:
        try:
            self._transaction([pending])
        except Exception as error:
            pending.error = error

    def _attempt(self, pending: _Pending) -> None:
        try:
            pending.result = pending.job(self._connection)
        except Exception as error:
            pending.error = error


def _resolve(group: list[_Pending]) -> None:
    """Hand the results back: one wake-up for each event loop, not one for each job."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Pending]] = {}
    for pending in group:
        by_loop.setdefault(pending.loop, []).append(pending)
    for loop, members in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, members)
        except RuntimeError:
            pass  # that loop has ended; nobody waits any more


def _settle(group: list[_Pending]) -> None:
    for pending in group:
        future = pending.future
        if future.done():  # the waiter was cancelled; the work is done all the same
            continue
        error = pending.error
        if error is None:
            future.set_result(pending.result)
        elif isinstance(error, sqlite3.Error):
            failure = StoreError(f"the response store failed: {error}")
            failure.__cause__ = error
            future.set_exception(failure)
        else:
            future.set_exception(error)
