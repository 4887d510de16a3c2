"""Background: the jobs of this process, its heartbeat in the store, and the burial of dead processes.

Each server process is a *worker* in the store. While it owns something there (a background response, the
hold on a conversation) it adds one to its beat every ``beat_seconds``; a worker whose beat has stood still
for ``patience`` of our own beats is dead, and the first to notice it puts back or fails what it left. What
was put back waits for any server on the store that has room for it. No clock is compared with another, and
time in which we were stopped ourselves does not count: neither a jumping clock nor a machine that was
suspended buries the living.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

from chorale.errors import ChoraleError, EngineError, QueueFullError
from chorale.ids import new_id

if TYPE_CHECKING:
    from chorale.store.protocol import Hold, ResponseStore

logger = logging.getLogger(__name__)

STOPPED = "the server stopped before the response was done"


class Job(Protocol):
    """``chorale.api.responses.background_job.Job``: a background response."""

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
    """``chorale.api.responses.resume.Resumer``: what other servers left behind."""

    @property
    def room(self) -> int: ...

    async def find(self) -> list[str]: ...

    async def take(self, response_id: str, worker: str) -> Job | None: ...


class Background:
    """One for each server process. ``watch`` runs as a task for its life; ``close`` at the end."""

    def __init__(self, *, beat_seconds: float = 2.0, patience: int = 7) -> None:
        self.worker = new_id("wrk")
        self._beat_seconds = beat_seconds
        self._patience = patience
        self._jobs: dict[str, Job] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._starting: set[str] = set()  # begun in the store, or about to be
        self._resuming: set[asyncio.Task[None]] = set()
        self.closing = False  # nothing new is begun, and what waits is for others
        self._holds: list[Hold] = []  # that could not be released yet
        self._problem = ""  # of the store, as it was logged
        self._seen: dict[str, tuple[int, int]] = {}  # other workers: their beat, and how often we saw it

    @property
    def num_jobs(self) -> int:
        return len(self._jobs) + len(self._starting)

    def find(self, response_id: str) -> Job | None:
        return self._jobs.get(response_id)

    def check_room(self, limit: int) -> None:
        """Raises ``QueueFullError`` when ``limit`` responses run already."""
        if self.num_jobs >= limit:
            raise QueueFullError("too many background responses are running", retry_after=1)

    async def launch(self, job: Job, limit: int) -> None:
        """Begin a job and let it run. Raises ``QueueFullError``, or what ``begin`` does."""
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
        """Beat, look for those that do not, and resume what waits. Runs until it is cancelled."""
        while True:
            try:
                await self._look(store)
                if resumer is not None and not self.closing:
                    await self._resume_waiting(resumer)
                self._problem = ""
            except ChoraleError as error:
                if error.message != self._problem:  # said once, however long it lasts
                    logger.warning("background responses: %s", error)
                self._problem = error.message
            await asyncio.sleep(self._beat_seconds)

    async def _look(self, store: ResponseStore) -> None:
        await self._release_holds(store)
        workers = await store.live.workers()
        if self.worker in workers:
            mine = set(self._jobs)
            live = await store.live.beat(self.worker)
            for response_id in mine - live:  # cancelled or deleted by another process, or we were buried
                job = self._jobs.get(response_id)
                if job is not None and not job.is_ending:
                    job.stop()
            if strays := live - mine - set(self._jobs) - self._starting:
                await store.live.fail(self.worker, strays)  # could not be taken back when they were refused
        await self._bury_the_dead(store, workers)

    async def _bury_the_dead(self, store: ResponseStore, workers: dict[str, int]) -> None:
        before, self._seen = self._seen, {}
        for worker, beat in workers.items():
            if worker == self.worker:
                continue
            known, num_times = before.get(worker, (beat, 0))
            num_times = num_times + 1 if known == beat else 1
            self._seen[worker] = beat, num_times
            if num_times > self._patience:
                failed = await store.live.bury(worker, beat)
                logger.warning("a server process is gone; its background responses failed: %s", failed)

    async def _resume_waiting(self, resumer: Resumer) -> None:
        """Begin what other servers left, as far as there is room; in tasks, so that the beat goes on."""
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
            job = await resumer.take(response_id, self.worker)
            if job is not None:
                await job.begin()
                self._jobs[response_id] = job
                self._run(job)
        except ChoraleError as error:
            logger.warning("background response %s: %s", response_id, error)
        finally:
            self._starting.discard(response_id)

    async def put_back(self, store: ResponseStore) -> None:
        """Leave what may be repeated to other servers, or to this one's next start. Never raises."""
        self.closing = True
        for task in list(self._resuming):
            task.cancel()
        await asyncio.gather(*self._resuming, return_exceptions=True)
        try:
            left = await store.live.put_back(self.worker)
        except ChoraleError as error:
            logger.warning("background responses could not be left to other servers: %s", error)
            return
        for response_id in left:
            if (job := self._jobs.get(response_id)) is not None:
                job.leave()

    async def let_go(self, store: ResponseStore, hold: Hold) -> None:
        """Release a conversation, now or, while the store cannot, with a later heartbeat. Never raises.

        A request does not wait for it longer than for the lock that refused it.
        """
        if store.fault is None:
            try:
                await store.conversations.release(hold)
                return
            except ChoraleError as error:
                logger.warning("conversation %s could not be released yet: %s", hold.conversation_id, error)
        self._holds.append(hold)

    async def _release_holds(self, store: ResponseStore) -> None:
        while self._holds:
            await store.conversations.release(self._holds[0])
            del self._holds[0]

    async def drain(self) -> None:
        """Wait until every job has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def close(self, store: ResponseStore) -> None:
        """Put back or fail what still runs, and leave the store."""
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
        with contextlib.suppress(ChoraleError):  # also lets go of the conversations
            await store.live.bury(self.worker, None)
