"""The heartbeat of a server process in the store, and the tasks that do the work it owns there.

While a server process owns something in the store (a background response, a batch, the lease on a
conversation, an upload), it increments its beat every ``BEAT_SECONDS``. A server whose beat has not changed
for ``patience`` beats of this process is dead. The first process to notice puts its work back, to wait for
any server with free capacity, or ends it. Clocks are not compared, and time in which this process was stopped
does not count, so clock jumps and suspends cannot expire a live server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from chorale.errors import ChoraleError
from chorale.ids import new_id
from chorale.machine.tasks import end_tasks

if TYPE_CHECKING:
    from chorale.store.protocol import Lease
    from chorale.store.store import ResponseStore

logger = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
Work = TypeVar("Work")


class Leases:
    """The id of this server process in the store, its heartbeats, and the expiry of dead servers."""

    def __init__(self, store: ResponseStore, patience: int = 7) -> None:
        self.server_id = new_id("srv")
        self._store = store
        self._patience = patience
        self._unreleased: list[Lease] = []
        self._seen: dict[str, tuple[int, int]] = {}  # other servers: last beat, times it was seen

    async def beat(self) -> set[str] | None:
        """Counts a heartbeat and expires dead servers.

        Returns the ids of the live responses of this server, or None if it owns nothing.
        """
        while self._unreleased:
            await self._store.conversations.release(self._unreleased[0])
            del self._unreleased[0]
        jobs = self._store.jobs
        servers = await jobs.servers()
        live = await jobs.beat(self.server_id) if self.server_id in servers else None
        await self._expire_dead(servers)
        return live

    async def _expire_dead(self, servers: dict[str, int]) -> None:
        before, self._seen = self._seen, {}
        for server_id, beat in servers.items():
            if server_id == self.server_id:
                continue
            known, num_times = before.get(server_id, (beat, 0))
            num_times = num_times + 1 if known == beat else 1
            self._seen[server_id] = beat, num_times
            if num_times > self._patience:
                failed = await self._store.jobs.expire(server_id, beat)
                logger.warning("a server process has died; its failed background responses: %s", failed)

    async def release(self, lease: Lease) -> None:
        """Releases a conversation now or, if the store fails, with a later heartbeat. Never raises."""
        if self._store.fault is None:
            try:
                await self._store.conversations.release(lease)
                return
            except ChoraleError as error:
                logger.warning("conversation %s could not be released yet: %s", lease.conversation_id, error)
        self._unreleased.append(lease)

    async def end(self) -> None:
        """Marks this server as dead in the store, which ends its live responses. Never raises."""
        with contextlib.suppress(ChoraleError):
            await self._store.jobs.expire(self.server_id, None)


class Service:
    """Background work of a server process. By default there is nothing to wait for."""

    @property
    def num_running(self) -> int:
        """Returns the number of running tasks for which ``drain`` would wait."""
        return 0

    async def run(self) -> None:
        """Runs until it is cancelled."""
        raise NotImplementedError

    def leave(self) -> None:
        """Stops taking work that another process can do."""

    async def drain(self) -> None:
        """Waits until the running work has ended."""

    async def put_back(self) -> None:
        """Gives work that another process can continue to other processes. Never raises."""

    async def close(self) -> None:
        """Ends all work. Never raises."""


class Works(Service, Generic[Work]):
    """The running work of one kind (background responses or batches), by id.

    ``_repeat`` looks at the store every ``beat_seconds``, and at once when ``woken`` is set.
    """

    kind: str  # name in log messages

    def __init__(self, *, beat_seconds: float = BEAT_SECONDS, woken: asyncio.Event | None = None) -> None:
        self._beat_seconds = beat_seconds
        self._woken = woken or asyncio.Event()
        self._works: dict[str, Work] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._problem = ""  # the store's last logged error
        self.closing = False  # begin no more work: other servers take it

    @property
    def num_running(self) -> int:
        return len(self._works)

    def find(self, work_id: str) -> Work | None:
        return self._works.get(work_id)

    async def _repeat(self, look: Callable[[], Awaitable[None]]) -> None:
        """Calls ``look`` regularly, until cancelled. A repeated error is logged once."""
        while True:
            try:
                await look()
                self._problem = ""
            except ChoraleError as error:
                if error.message != self._problem:
                    logger.warning("%s: %s", self.kind, error)
                self._problem = error.message
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._beat_seconds):
                    await self._woken.wait()
            self._woken.clear()

    def _start(self, work_id: str, work: Work, running: Coroutine[Any, Any, None]) -> None:
        self._works[work_id] = work
        task = self._tasks[work_id] = asyncio.create_task(running)
        task.add_done_callback(lambda done: self._ended(work_id, done))

    def _ended(self, work_id: str, task: asyncio.Task[None]) -> None:
        del self._works[work_id], self._tasks[work_id]
        if not task.cancelled() and (fault := task.exception()) is not None:
            logger.error("%s: %s", self.kind, work_id, exc_info=fault)

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _abort(self) -> None:
        await end_tasks(*self._tasks.values())
