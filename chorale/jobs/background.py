"""Background: runs the background responses of this process.

Responses that were put back wait for any server with free capacity (``chorale.jobs.leases``).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from chorale.client.shares import Shares
from chorale.engine.types import Owner
from chorale.errors import ChoraleError, EngineError, QueueFullError
from chorale.jobs.leases import BEAT_SECONDS, Leases, Works
from chorale.machine.tasks import end_tasks

if TYPE_CHECKING:
    from chorale.store.store import ResponseStore

logger = logging.getLogger(__name__)

STOPPED = "the server stopped before the response was done"


class Job(Protocol):
    """A background response; see ``chorale.api.responses.background.job.Job``."""

    @property
    def response_id(self) -> str: ...

    @property
    def owner(self) -> Owner: ...

    @property
    def is_ending(self) -> bool: ...

    async def begin(self) -> None: ...

    async def run(self) -> None: ...

    async def ended(self) -> None: ...

    def written(self) -> asyncio.Event: ...

    def stop(self, error: ChoraleError | None = None) -> None: ...

    def leave(self) -> None: ...


class Resumer(Protocol):
    """Resumes responses of other servers; see ``chorale.api.responses.background.resume.Resumer``."""

    @property
    def room(self) -> int: ...

    async def find(self) -> list[str]: ...

    async def take(self, response_id: str, server_id: str) -> Job | None: ...


class Background(Works[Job]):
    """One per server process. ``run`` is a task for the life of the process; ``close`` ends its work.

    ``resumer``: None until the server may take over waiting responses. ``leave`` does nothing: requests that
    are still accepted may start responses.
    """

    kind = "background responses"

    def __init__(
        self, store: ResponseStore, *, beat_seconds: float = BEAT_SECONDS, patience: int = 7
    ) -> None:
        super().__init__(beat_seconds=beat_seconds)
        self._rows = store.background
        self.leases = Leases(store, patience)
        self.resumer: Resumer | None = None
        self._shares = Shares()
        self._starting: set[str] = set()  # responses that are being begun
        self._resuming: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        return len(self._works) + len(self._starting)

    def check_room(self, owner: Owner, limit: int) -> None:
        """Raises ``QueueFullError`` if ``limit`` responses are running and the owner has its share."""
        num_resuming = self.num_running - self._shares.total  # their owners are not known yet
        if not self._shares.admits(owner, 1, limit - num_resuming):
            raise QueueFullError("too many background responses are running", retry_after=1)

    async def launch(self, job: Job, limit: int) -> None:
        """Begins a job and runs it as a task. Raises ``QueueFullError``, or an error of ``begin``."""
        self.check_room(job.owner, limit)
        self._starting.add(job.response_id)
        self._shares.take(job.owner)
        try:
            await job.begin()
        except BaseException:
            self._shares.give(job.owner)
            raise
        finally:
            self._starting.discard(job.response_id)
        self._start(job.response_id, job, job.run())

    def _ended(self, work_id: str, task: asyncio.Task[None]) -> None:
        self._shares.give(self._works[work_id].owner)
        super()._ended(work_id, task)

    # ------------------------------------------------------------------ for the life of the process

    async def run(self) -> None:
        """Sends heartbeats, expires dead servers and resumes waiting responses, until cancelled."""
        await self._repeat(self._look)

    async def _look(self) -> None:
        await self._beat()
        if self.resumer is not None and not self.closing:
            await self._resume_waiting(self.resumer)

    async def _beat(self) -> None:
        mine = set(self._works)
        live = await self.leases.beat()
        if live is None:
            return
        for response_id in mine - live:  # cancelled, deleted or expired by another process
            job = self._works.get(response_id)
            if job is not None and not job.is_ending:
                job.stop()
        if strays := live - mine - set(self._works) - self._starting:
            await self._rows.fail(self.leases.server_id, strays)  # left over from refused requests

    async def _resume_waiting(self, resumer: Resumer) -> None:
        """Begins waiting responses while there is room, in tasks, so that heartbeats continue."""
        for response_id in await resumer.find():
            if self.num_running >= resumer.room:
                return
            if response_id not in self._starting and response_id not in self._works:
                self._starting.add(response_id)
                task = asyncio.create_task(self._resume(resumer, response_id))
                self._resuming.add(task)
                task.add_done_callback(self._resuming.discard)

    async def _resume(self, resumer: Resumer, response_id: str) -> None:
        try:
            job = await resumer.take(response_id, self.leases.server_id)
            if job is not None:
                await job.begin()
                self._shares.take(job.owner)
                self._start(response_id, job, job.run())
        except ChoraleError as error:
            logger.warning("background response %s: %s", response_id, error)
        finally:
            self._starting.discard(response_id)

    async def put_back(self) -> None:
        """Puts back resumable responses for other servers or the next start of this one. Never raises."""
        self.closing = True
        await end_tasks(*self._resuming)
        try:
            left = await self._rows.put_back(self.leases.server_id)
        except ChoraleError as error:
            logger.warning("background responses could not be put back: %s", error)
            return
        for response_id in left:
            if (job := self._works.get(response_id)) is not None:
                job.leave()

    async def close(self) -> None:
        """Puts back or fails running responses, and unregisters from the store."""
        await self.put_back()
        error: ChoraleError = EngineError(STOPPED, code="server_restarted")
        for job in list(self._works.values()):
            job.stop(error)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=5)
        await self._abort()
        await self.leases.end()
