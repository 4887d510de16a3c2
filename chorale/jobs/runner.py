"""BatchRunner: runs the batches of this server process, and deletes old files and batches.

``chorale.jobs.background`` sends the heartbeats and expires dead servers; the store then puts their batches
back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chorale.config.engine import ServerConfig
from chorale.errors import ChoraleError
from chorale.jobs.contents import Contents
from chorale.jobs.execute import LineRetries, Sender
from chorale.jobs.leases import Works
from chorale.jobs.lines import LostError, Sending
from chorale.jobs.slots import MAX_LINES_BYTES, Slots
from chorale.jobs.work import BatchWork
from chorale.store.batch_rows import Result
from chorale.store.store import ResponseStore

logger = logging.getLogger(__name__)

AT_ONCE = 8  # batches that one process runs concurrently; others wait
_READY_SECONDS = 0.2  # between checks whether the engine is ready
_SWEEP_SECONDS = 30.0  # between two sweeps
# Patience is infinite: an engine may be unavailable for long, and the batch's completion window ends retries.
_RETRIES = LineRetries(patience=math.inf, first_delay=0.1, longest_delay=10.0, max_errors=3, max_crashes=10)


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine as seen by the runner. ``concurrency``: number of lines that may be in flight now."""

    served_model: str
    is_ready: Callable[[], bool]
    concurrency: Callable[[], int]


class BatchRunner(Works[BatchWork]):
    """One per server process. ``run`` is a task for the life of the process; ``close`` stops the batches.

    Setting ``woken`` makes it look at the store at once. ``sender(owner)`` sends lines as that owner.
    ``counted``: see ``LineWork``.
    """

    kind = "batches"

    def __init__(
        self,
        store: ResponseStore,
        contents: Contents,
        server_id: str,
        engine: Engine,
        config: ServerConfig,
        *,
        woken: asyncio.Event,
        sender: Callable[[bytes], Sender],
        counted: Callable[[Sequence[Result]], None] = lambda results: None,
    ) -> None:
        super().__init__(woken=woken)
        self._store, self._contents, self._server_id = store, contents, server_id
        self._engine, self._config, self._sender, self._counted = engine, config, sender, counted
        self._slots = Slots(engine.concurrency, MAX_LINES_BYTES)
        self._swept = -_SWEEP_SECONDS

    async def run(self) -> None:
        """Claims batches and looks for changes by other processes, until cancelled."""
        await self._repeat(self._look)

    async def _look(self) -> None:
        self._slots.look()
        for work in list(self._works.values()):
            await work.look()
        now = asyncio.get_running_loop().time()
        if now - self._swept >= _SWEEP_SECONDS:
            self._swept = now
            await self.sweep()
        while not self.closing and len(self._works) < AT_ONCE and self._engine.concurrency() > 0:
            if not await self._claim():
                return

    async def _claim(self) -> bool:
        rows, model = self._store.batches, self._engine.served_model
        if not await rows.any_waiting(model):
            return False
        batch = await rows.claim(self._server_id, model)
        if batch is None or self.closing:  # set during the claim; ``close`` puts the batch back
            return False
        work = BatchWork(
            batch,
            self._store,
            self._contents,
            self._server_id,
            sending=Sending(self._sender(batch.owner), self._slots, _RETRIES, self._ready),
            config=self._config,
            counted=self._counted,
        )
        self._start(batch.id, work, self._run(work))
        return True

    async def _run(self, work: BatchWork) -> None:
        """Runs a batch. An unexpected error fails the batch, which would otherwise never end."""
        try:
            await work.run()
        except LostError:
            logger.warning("%s now belongs to another server, or was deleted", work.id)
        except Exception:
            logger.exception("%s", work.id)
            fault = {"code": "server_error", "line": None, "message": "internal error", "param": None}
            with contextlib.suppress(ChoraleError):
                await self._store.batches.end(work.id, self._server_id, "failed", faults=[fault])

    def _ended(self, work_id: str, task: asyncio.Task[None]) -> None:
        super()._ended(work_id, task)
        self._sweep_soon()

    def _sweep_soon(self) -> None:
        self._swept = -_SWEEP_SECONDS
        self._woken.set()

    async def _ready(self) -> None:
        while not self._engine.is_ready():
            await asyncio.sleep(_READY_SECONDS)

    async def sweep(self) -> None:
        """Deletes the contents of deleted files, records of ended batches, and old batches."""
        if gone := await self._store.files.sweep():
            for file_id in gone:
                await self._contents.delete(file_id)
            await self._store.files.forget(gone)
        if await self._store.batches.sweep(self._config.batch_ttl) or gone:
            self._sweep_soon()  # there may be more

    # ------------------------------------------------------------------ the end of the process

    def leave(self) -> None:
        """Sends no further lines. Those in flight may still be answered."""
        self.closing = True
        for work in self._works.values():
            work.leave()
        self._slots.end()

    async def put_back(self) -> None:
        """Aborts the lines in flight and puts the batches back. Never raises. Idempotent."""
        self.closing = True
        await self._abort()
        try:
            await self._store.batches.release(self._server_id)
        except ChoraleError as error:
            logger.warning("batches could not be put back: %s", error)

    async def close(self) -> None:
        """Puts the batches back. Never raises."""
        await self.put_back()
