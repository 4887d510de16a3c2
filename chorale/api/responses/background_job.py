"""Job: one background response, from ``queued`` in the store to its end there. It has no connection.

Two tasks: one reads the turn into a bounded buffer, the other writes the buffer to the store, a piece at a
time. Readers of the stream read the store, so an event that somebody saw is never lost, and a stream looks
the same live, resumed, from another process and after the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from chorale.api.responses.run import Run
from chorale.errors import ChoraleError
from chorale.store.protocol import EventChunk, ResponseStore, StoreError

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 2**20  # the turn waits when the store is this far behind
_RETRY_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0)  # between attempts to write to a store that fails


class Job:
    """``begin``, then ``run`` as a task; ``stop`` at any time."""

    def __init__(
        self,
        run: Run,
        store: ResponseStore,
        worker: str,
        flush_seconds: float = 0.05,
        *,
        request: bytes | None = None,
        resumed: bool = False,
    ) -> None:
        """``request``: what another server needs to begin it again. ``resumed``: it is one that was begun."""
        self._run = run
        self._store = store
        self._live = store.live
        self._worker = worker
        self._flush_seconds = flush_seconds
        self._request = request
        self._resumed = resumed
        self._left = False  # to another server
        self._acted = asyncio.Event()  # the store knows that a tool may have changed something
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._num_written = 0
        self._more = asyncio.Event()
        self._room = asyncio.Event()
        self._written = asyncio.Event()
        self._produce: asyncio.Task[None] | None = None
        self._stopped: tuple[ChoraleError | None] | None = None  # asked to end: with this error, or cancelled
        self._ended = asyncio.Event()

    @property
    def response_id(self) -> str:
        return self._run.response_id

    @property
    def is_ending(self) -> bool:
        """Whether its turn is over: its end is being stored, or is about to be."""
        return self._stopped is not None or (self._produce is not None and self._produce.done())

    def written(self) -> asyncio.Event:
        """Set when more events than now are in the store. Ask for it before reading there."""
        return self._written

    async def begin(self) -> None:
        """Store the response as queued, then hand it to the engine. Raises what either refuses."""
        row = self._run.wait()
        self._add(self._run.translator.queue())
        beginning = self._take()
        if self._resumed:  # its row and its first events are there
            await self._begin_again()
            return
        try:
            await self._live.begin(row, self._worker, beginning, self._request)
            await self._run.start()
        except StoreError:
            await self._run.close()
            raise  # nothing was stored
        except BaseException:
            await self._run.close()
            with contextlib.suppress(StoreError):  # if it cannot be taken back, the next heartbeat ends it
                await self._store.delete(self.response_id, self._run.owner)
            raise

    async def _begin_again(self) -> None:
        try:
            await self._run.start()
        except BaseException:
            await self._run.close()
            await self._live.unclaim(self.response_id, self._worker)
            await self._run.release()
            raise

    def stop(self, error: ChoraleError | None = None) -> None:
        """End it soon, as cancelled or as failed with ``error``. Too late for one that is ending already."""
        if self._stopped is None:
            self._stopped = (error,)
        if self._produce is not None:
            self._produce.cancel()

    def leave(self) -> None:
        """Stop working on it, because it waits for another server now."""
        self._left = True
        if self._produce is not None:
            self._produce.cancel()

    async def ended(self) -> None:
        """Returns when the store has the end."""
        await self._ended.wait()

    async def run(self) -> None:
        """Until the end is in the store, or the response is not ours any more."""
        self._produce = asyncio.create_task(self._read_turn())
        # Not in the task itself: one that is cancelled before it begins runs nothing of its own.
        self._produce.add_done_callback(lambda _: self._more.set())
        if self._stopped is not None or self._left:
            self._produce.cancel()
        try:
            ours = await self._write_while_it_runs(self._produce)
            if ours and not self._left:
                await self._end(self._produce)
        finally:
            self._produce.cancel()
            await asyncio.gather(self._produce, return_exceptions=True)
            await self._run.close()
            await self._run.release()
            self._ended.set()
            self._notify()

    # ------------------------------------------------------------------ the turn

    async def _read_turn(self) -> None:
        async for piece in self._run.pieces(begin=True):
            self._add(piece)
            self._more.set()
            if self._run.acts:  # before the tool runs: a server that dies then must not repeat it
                await self._acted.wait()
            while self._num_pending_bytes > MAX_PENDING_BYTES:
                self._room.clear()
                await self._room.wait()

    # ------------------------------------------------------------------ the store

    async def _write_while_it_runs(self, produce: asyncio.Task[None]) -> bool:
        """Write what comes until the turn is over; False when the response is not ours any more."""
        while not produce.done():
            await self._more.wait()
            self._more.clear()
            if produce.done():
                break
            if not await self._append():
                return False
            await asyncio.wait({produce}, timeout=self._flush_seconds)
        return True

    async def _append(self) -> bool:
        chunk = self._take()
        if not chunk.num_events:
            return True
        for delay in (*_RETRY_SECONDS, None):
            try:
                acts = self._run.acts
                ours = await self._live.append(
                    self.response_id, self._worker, "in_progress", chunk, repeatable=not acts
                )
            except StoreError as error:
                if delay is None or self._stopped is not None:
                    self._give_back(chunk)
                    self.stop(error)
                    return True
                logger.warning("events of %s could not be stored: %s", self.response_id, error)
                await asyncio.sleep(delay)
            else:
                if acts:
                    self._acted.set()
                self._notify()
                return ours
        return True

    async def _end(self, produce: asyncio.Task[None]) -> None:
        await asyncio.gather(produce, return_exceptions=True)
        await self._run.close()
        status = self._cut(produce)
        ended = self._run.conclude(status)
        self._add(self._run.translator.finish(ended.body))
        chunk = self._take()
        attempt = 0
        while True:
            try:
                if await self._live.finish(ended.record, self._worker, chunk, self._run.hold):
                    self._run.hold = None
                return
            except StoreError as error:
                # It stays in progress for its readers, and ours, until the store works again; a restart of
                # this process fails it.
                logger.error("the end of %s could not be stored: %s", self.response_id, error)
                await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
                attempt += 1

    def _cut(self, produce: asyncio.Task[None]) -> str | None:
        """Close what the turn left open, if it did not come to its own end. The status to end with."""
        error: ChoraleError | None = None
        if not produce.cancelled() and (fault := produce.exception()) is not None:
            logger.error("response %s failed", self.response_id, exc_info=fault)
            error = fault if isinstance(fault, ChoraleError) else ChoraleError("an internal error occurred")
        elif self._stopped is not None:
            (error,) = self._stopped
        else:
            return None
        if self._run.has_ended:
            return None
        self._add(self._run.cut(error))
        return "cancelled" if error is None else None

    # ------------------------------------------------------------------ the buffer

    def _add(self, piece: bytes) -> None:
        self._pending.append(piece)
        self._num_pending_bytes += len(piece)

    def _take(self) -> EventChunk:
        """Everything that is not written yet. Pieces and the translator's count are of one moment."""
        first, num_events = self._num_written, self._run.translator.num_events - self._num_written
        data = b"".join(self._pending)
        self._num_written += num_events
        self._pending, self._num_pending_bytes = [], 0
        self._room.set()
        return EventChunk(first, num_events, data)

    def _give_back(self, chunk: EventChunk) -> None:
        self._pending.insert(0, chunk.data)
        self._num_pending_bytes += len(chunk.data)
        self._num_written = chunk.first

    def _notify(self) -> None:
        self._written.set()
        self._written = asyncio.Event()
