"""One thread that owns one database connection: jobs in, asyncio results out.

Write jobs that wait together share one transaction, so a busy server pays one fsync for many responses. A
job is acknowledged only after the commit. If the shared transaction fails, each job is tried alone, so that
only the faulty ones fail. A connection that broke is opened anew for the next job.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from chorale.api.responses.database import Database
from chorale.api.responses.stored import StoreError
from chorale.errors import ChoraleError

Result = TypeVar("Result")
Job = Callable[[Database], Any]

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


class DatabaseWorker:
    """``connect`` runs here, before the thread starts, so that a bad file or address fails at start-up."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Database],
        *,
        writes: bool,
        idle: Job | None = None,
        idle_seconds: float = 60.0,
    ) -> None:
        self._connect = connect
        self._connection = connect()
        self._writes = writes
        self._idle = idle
        self._idle_seconds = idle_seconds
        self._queue: queue.SimpleQueue[_Pending | _Stop] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[Database], Result]) -> Result:
        """Run a job on the thread. Raises ``StoreError`` for what the database refuses."""
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
        # Housekeeping: it is tried again, and a put that fails for the same reason says so. Whatever
        # happens, the thread must live: requests wait for it.
        with contextlib.suppress(StoreError, self._connection.errors):
            self._reconnect()
            try:
                self._idle(self._connection)
            finally:
                self._connection.rollback()

    def _execute(self, group: list[_Pending]) -> None:
        try:
            self._transaction(group)
        except Exception:
            for pending in group:
                self._alone(pending)

    def _transaction(self, group: list[_Pending]) -> None:
        self._reconnect()
        connection = self._connection
        try:
            connection.begin(self._writes)
            for pending in group:
                pending.result = pending.job(connection)
            connection.commit()
        except BaseException:
            with contextlib.suppress(connection.errors):
                connection.rollback()
            raise

    def _alone(self, pending: _Pending) -> None:
        try:
            self._transaction([pending])
        except ChoraleError as error:
            pending.error = error
        except self._connection.errors as error:
            pending.error = StoreError(f"the response store failed: {error}")
            pending.error.__cause__ = error
        except Exception as error:
            pending.error = error

    def _reconnect(self) -> None:
        """Raises ``StoreError`` while the database cannot be reached."""
        if self._connection.broken:
            self._connection = self._connect()


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
        if pending.error is None:
            future.set_result(pending.result)
        else:
            future.set_exception(pending.error)
