"""Job: runs one background response, from ``queued`` in the store to its end, without a client connection.

One task reads the turn into a bounded buffer; the other writes the buffer to the store in chunks. Streams are
rendered from the stored events, so an event that a client has seen is never lost, and a stream is the same
when live, resumed, served by another process, or read after the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from chorale.api.responses.event_log import LogEvent, join, pack
from chorale.api.responses.run import Run
from chorale.api.telemetry.request_trace import begin_background, end_background
from chorale.engine.types import Owner
from chorale.errors import ChoraleError
from chorale.store.protocol import EventChunk, StoreError
from chorale.tracing.context import RequestContext

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 2**20  # size of the unwritten events above which the turn pauses
_FLUSH_SECONDS = 0.05
_RETRY_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0)  # delays between attempts to write


class Job:
    """Call ``begin``, then start ``run`` as a task. ``stop`` may be called at any time."""

    def __init__(self, run: Run, *, request: bytes | None = None, resumed: bool = False) -> None:
        """``request``: the packed body, to resume on another server. ``resumed``: another server began it."""
        self._run = run
        self._rows = run.state.store.background
        self._server_id = run.state.leases.server_id
        self._request = request
        self._resumed = resumed
        self._left = False  # the response waits for another server
        self._acted = asyncio.Event()  # set once the store knows that a tool may have side effects
        self._pending: list[bytes] = []  # packed events, not yet written
        self._num_pending_bytes = 0
        self._num_written = 0
        self._more = asyncio.Event()
        self._room = asyncio.Event()
        self._written = asyncio.Event()
        self._produce: asyncio.Task[None] | None = None
        self._stopped: tuple[ChoraleError | None] | None = None  # (error,), or (None,) if cancelled
        self._ended = asyncio.Event()
        self._traced: RequestContext | None = None

    @property
    def response_id(self) -> str:
        return self._run.response_id

    @property
    def owner(self) -> Owner:
        return self._run.state.owner(self._run.owner)

    @property
    def is_ending(self) -> bool:
        """Returns whether the turn is over or stopped, so that only its end is left to store."""
        return self._stopped is not None or (self._produce is not None and self._produce.done())

    def written(self) -> asyncio.Event:
        """Returns an event that the next write sets. Call this before reading the store."""
        return self._written

    async def begin(self) -> None:
        """Stores the response as queued, then submits it to the engine. Raises if either fails."""
        self._traced = begin_background(self._run.state, self.response_id, resumed=self._resumed)
        try:
            row = self._run.queued_row()
            if not self._resumed:
                await self._rows.begin(row, self._server_id, self._request)
            await self._run.start()
        except BaseException as error:
            end_background(self._run.state, self._traced, getattr(error, "code", type(error).__name__))
            await self._run.close()
            if not isinstance(error, StoreError):  # which came before anything was stored
                await self._undo()
            raise

    async def _undo(self) -> None:
        """Removes a response that the engine refused, or puts back one that another server began."""
        if not self._resumed:
            with contextlib.suppress(StoreError):  # on failure, the next heartbeat ends the response
                await self._run.state.store.delete(self.response_id, self._run.owner)
            return
        try:
            await self._rows.put_back(self._server_id, self.response_id)
        finally:  # also when the store fails
            await self._run.release()

    def stop(self, error: ChoraleError | None = None) -> None:
        """Ends the response soon, as cancelled or failed with ``error``. No effect once it is ending."""
        if self._stopped is None:
            self._stopped = (error,)
        if self._produce is not None:
            self._produce.cancel()

    def leave(self) -> None:
        """Stops without an end, because the response now waits for another server."""
        self._left = True
        if self._produce is not None:
            self._produce.cancel()

    async def ended(self) -> None:
        """Waits until the end is stored or this server no longer owns the response."""
        await self._ended.wait()

    async def run(self) -> None:
        """Runs until the end is stored, or until this server no longer owns the response."""
        self._produce = asyncio.create_task(self._read_turn())
        # A callback, because a task that is cancelled before it starts runs none of its code.
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
            self._end_trace()
            self._ended.set()
            self._notify()

    def _end_trace(self) -> None:
        error = "moved" if self._left else None
        if self._stopped is not None:
            error = "cancelled" if self._stopped[0] is None else self._stopped[0].code
        if self._traced is not None:
            end_background(self._run.state, self._traced, error)

    # ------------------------------------------------------------------ the turn

    async def _read_turn(self) -> None:
        async for events in self._run.events():
            self._add(events)
            self._more.set()
            if self._run.acts:  # before the tool runs, so that it is not repeated after a crash
                await self._acted.wait()
            while self._num_pending_bytes > MAX_PENDING_BYTES:
                self._room.clear()
                await self._room.wait()

    # ------------------------------------------------------------------ the store

    async def _write_while_it_runs(self, produce: asyncio.Task[None]) -> bool:
        """Writes events until the turn is over. Returns False if this server no longer owns the response."""
        while not produce.done():
            await self._more.wait()
            self._more.clear()
            if produce.done():
                break
            if not await self._append():
                return False
            await asyncio.wait({produce}, timeout=_FLUSH_SECONDS)
        return True

    async def _append(self) -> bool:
        acts, chunk = self._run.acts, self._chunk()
        if not chunk.num_events:
            return True
        for delay in (*_RETRY_SECONDS, None):
            try:
                ours = await self._rows.append(
                    self.response_id, self._server_id, "in_progress", chunk, repeatable=not acts
                )
            except StoreError as error:
                if delay is None or self._stopped is not None:
                    self.stop(error)
                    return True
                logger.warning("events of %s could not be stored: %s", self.response_id, error)
                await asyncio.sleep(delay)
            else:
                self._drop(chunk)
                if acts:
                    self._acted.set()
                self._notify()
                return ours
        return True

    async def _end(self, produce: asyncio.Task[None]) -> None:
        await asyncio.gather(produce, return_exceptions=True)
        await self._run.close()
        status = self._cut(produce)
        ended, chunk = self._run.conclude(status), self._chunk()
        attempt = 0
        while True:
            try:
                if await self._rows.finish(ended.record, self._server_id, chunk, self._run.lease):
                    self._run.lease = None
                return
            except StoreError as error:
                # Readers see the response in progress until the store works again.
                logger.error("the end of %s could not be stored: %s", self.response_id, error)
                await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
                attempt += 1

    def _cut(self, produce: asyncio.Task[None]) -> str | None:
        """Closes the open items of a turn that was cut short. Returns the status to end with, if any."""
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

    def _add(self, events: list[LogEvent]) -> None:
        self._run.fold(events)
        packed = [data for event in events if (data := pack(event)) is not None]
        self._pending += packed
        self._num_pending_bytes += _size(packed)

    def _chunk(self) -> EventChunk:
        """Returns all events not yet written."""
        return EventChunk(self._num_written, len(self._pending), join(self._pending))

    def _drop(self, chunk: EventChunk) -> None:
        """Removes written events from the buffer."""
        self._num_pending_bytes -= _size(self._pending[: chunk.num_events])
        del self._pending[: chunk.num_events]
        self._num_written += chunk.num_events
        self._room.set()

    def _notify(self) -> None:
        self._written.set()
        self._written = asyncio.Event()


def _size(packed: Iterable[bytes]) -> int:
    return sum(map(len, packed))
