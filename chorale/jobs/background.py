"""Background: the background jobs of this process, its heartbeat, and the expiry of dead servers.

While a server process owns something in the store (a background response, the lease on a conversation), it
increments its beat every ``beat_seconds``. A server whose beat has not changed for ``patience`` beats of this
process is dead; the first process to notice puts back or fails its responses. Responses that were put back
wait for any server with room. Clocks are not compared, and time in which this process was stopped does not
count, so clock jumps and suspends cannot expire a live server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

from chorale.errors import ChoraleError, EngineError, QueueFullError
from chorale.ids import new_id

if TYPE_CHECKING:
    from chorale.store.protocol import Lease
    from chorale.store.store import ResponseStore

logger = logging.getLogger(__name__)

STOPPED = "the server stopped before the response was done"


class Job(Protocol):
    """``chorale.api.responses.background.job.Job``: a background response."""

    @property
    def response_id(self) -> str: ...

    @property
    def is_ending(self) -> bool: ...

    async def begin(self) -> None: ...

    async def run(self) -> None: ...

    async def ended(self) -> None: ...

    def written(self) -> asyncio.Event: ...

    def stop(self, error: ChoraleError | None = None) -> None: ...

    def leave(self) -> None: ...


class Resumer(Protocol):
    """``chorale.api.responses.background.resume.Resumer``: resumes responses of other servers."""

    @property
    def room(self) -> int: ...

    async def find(self) -> list[str]: ...

    async def take(self, response_id: str, server_id: str) -> Job | None: ...


class Background:
    """One per server process. ``watch`` runs as a task all the time; ``close`` ends it."""

    def __init__(self, *, beat_seconds: float = 2.0, patience: int = 7) -> None:
        self.server_id = new_id("srv")
        self._beat_seconds = beat_seconds
        self._patience = patience
        self._jobs: dict[str, Job] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._starting: set[str] = set()  # begun in the store, or about to be
        self._resuming: set[asyncio.Task[None]] = set()
        self.closing = False  # begin nothing; leave waiting responses to other servers
        self._leases: list[Lease] = []  # not released yet
        self._problem = ""  # the store's last logged error
        self._seen: dict[str, tuple[int, int]] = {}  # other servers: beat, times seen

    @property
    def num_jobs(self) -> int:
        return len(self._jobs) + len(self._starting)

    def find(self, response_id: str) -> Job | None:
        return self._jobs.get(response_id)

    def check_room(self, limit: int) -> None:
        """Raises ``QueueFullError`` if ``limit`` responses are running."""
        if self.num_jobs >= limit:
            raise QueueFullError("too many background responses are running", retry_after=1)

    async def launch(self, job: Job, limit: int) -> None:
        """Begins a job and runs it as a task. Raises ``QueueFullError``, or an error of ``begin``."""
        self.check_room(limit)
        self._starting.add(job.response_id)
        try:
            await job.begin()
            self._jobs[job.response_id] = job
        finally:
            self._starting.discard(job.response_id)
        self._run(job)

    def _run(self, job: Job) -> None:
        task = self._tasks[job.response_id] = asyncio.create_task(job.run())
        task.add_done_callback(lambda done: self._ended(job.response_id, done))

    def _ended(self, response_id: str, task: asyncio.Task[None]) -> None:
        del self._jobs[response_id], self._tasks[response_id]
        if not task.cancelled() and (fault := task.exception()) is not None:
            logger.error("background response %s", response_id, exc_info=fault)

    # ------------------------------------------------------------------ for the life of the process

    async def watch(self, store: ResponseStore, resumer: Resumer | None = None) -> None:
        """Sends heartbeats, expires dead servers and resumes waiting responses, until cancelled."""
        while True:
            try:
                await self._look(store)
                if resumer is not None and not self.closing:
                    await self._resume_waiting(resumer)
                self._problem = ""
            except ChoraleError as error:
                if error.message != self._problem:  # logged once
                    logger.warning("background responses: %s", error)
                self._problem = error.message
            await asyncio.sleep(self._beat_seconds)

    async def _look(self, store: ResponseStore) -> None:
        await self._release_leases(store)
        servers = await store.jobs.servers()
        if self.server_id in servers:
            mine = set(self._jobs)
            live = await store.jobs.beat(self.server_id)
            for response_id in mine - live:  # cancelled, deleted or expired by another process
                job = self._jobs.get(response_id)
                if job is not None and not job.is_ending:
                    job.stop()
            if strays := live - mine - set(self._jobs) - self._starting:
                await store.background.fail(self.server_id, strays)  # refused earlier
        await self._expire_dead(store, servers)

    async def _expire_dead(self, store: ResponseStore, servers: dict[str, int]) -> None:
        before, self._seen = self._seen, {}
        for server_id, beat in servers.items():
            if server_id == self.server_id:
                continue
            known, num_times = before.get(server_id, (beat, 0))
            num_times = num_times + 1 if known == beat else 1
            self._seen[server_id] = beat, num_times
            if num_times > self._patience:
                failed = await store.jobs.expire(server_id, beat)
                logger.warning("a server process is gone; its background responses failed: %s", failed)

    async def _resume_waiting(self, resumer: Resumer) -> None:
        """Begins waiting responses as far as there is room, in tasks, so that heartbeats continue."""
        for response_id in await resumer.find():
            if self.num_jobs >= resumer.room:
                return
            if response_id not in self._starting and response_id not in self._jobs:
                self._starting.add(response_id)
                task = asyncio.create_task(self._resume(resumer, response_id))
                self._resuming.add(task)
                task.add_done_callback(self._resuming.discard)

    async def _resume(self, resumer: Resumer, response_id: str) -> None:
        try:
            job = await resumer.take(response_id, self.server_id)
            if job is not None:
                await job.begin()
                self._jobs[response_id] = job
                self._run(job)
        except ChoraleError as error:
            logger.warning("background response %s: %s", response_id, error)
        finally:
            self._starting.discard(response_id)

    async def put_back(self, store: ResponseStore) -> None:
        """Puts back resumable responses for other servers or the next start of this one. Never raises."""
        self.closing = True
        for task in list(self._resuming):
            task.cancel()
        await asyncio.gather(*self._resuming, return_exceptions=True)
        try:
            left = await store.background.put_back(self.server_id)
        except ChoraleError as error:
            logger.warning("background responses could not be left to other servers: %s", error)
            return
        for response_id in left:
            if (job := self._jobs.get(response_id)) is not None:
                job.leave()

    async def release(self, store: ResponseStore, lease: Lease) -> None:
        """Releases a conversation now or, if the store fails, with a later heartbeat. Never raises."""
        if store.fault is None:
            try:
                await store.conversations.release(lease)
                return
            except ChoraleError as error:
                logger.warning("conversation %s could not be released yet: %s", lease.conversation_id, error)
        self._leases.append(lease)

    async def _release_leases(self, store: ResponseStore) -> None:
        while self._leases:
            await store.conversations.release(self._leases[0])
            del self._leases[0]

    async def drain(self) -> None:
        """Waits until all jobs have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def close(self, store: ResponseStore) -> None:
        """Puts back or fails running responses, and unregisters from the store."""
        await self.put_back(store)
        error: ChoraleError = EngineError(STOPPED, code="server_restarted")
        for job in list(self._jobs.values()):
            job.stop(error)
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(ChoraleError):  # also ends the leases
            await store.jobs.expire(self.server_id, None)
