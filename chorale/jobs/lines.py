"""LineWork: sends the lines of a batch that have no record yet, and stores their records as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from chorale.errors import ChoraleError
from chorale.jobs.execute import LineRetries, Sender, execute
from chorale.jobs.input import split_lines
from chorale.jobs.line import LARGE, Line, Record, parse_line
from chorale.jobs.slots import Slots
from chorale.machine.tasks import end_tasks
from chorale.requests.usage import usage_of
from chorale.store.batch_rows import Result, StoredBatch, Tokens
from chorale.store.batches import Batches
from chorale.store.protocol import StoreError

logger = logging.getLogger(__name__)

_GROUP = 256  # most records per write
_READ_RECORDS = 64  # records per query
_RETRY_SECONDS = 1.0

Stopped = Literal["", "cancelling", "expired", "lost", "leaving"]


class LostError(ChoraleError):
    """The batch belongs to another server now, or was deleted."""

    def __init__(self) -> None:
        super().__init__("another process owns the batch, or it was deleted")


@dataclass(frozen=True, slots=True)
class Sending:
    """How lines are sent: each waits for a slot and, with ``ready``, for the engine."""

    send: Sender
    slots: Slots
    retries: LineRetries
    ready: Callable[[], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line of the input: its number from 1, and its size in bytes."""

    number: int
    size: int


class LineWork:
    """Sends a batch. ``read`` yields the input in pieces. ``counted`` is called with the stored results."""

    def __init__(
        self,
        batch: StoredBatch,
        rows: Batches,
        server_id: str,
        read: Callable[[], AsyncGenerator[bytes]],
        *,
        sending: Sending,
        max_line_bytes: int,
        counted: Callable[[Sequence[Result]], None],
    ) -> None:
        self._batch, self._rows, self._server_id, self._read = batch, rows, server_id, read
        self._sending, self._slots, self._max_line_bytes = sending, sending.slots, max_line_bytes
        self._counted = counted
        self._stopped: Stopped = ""
        self._task: asyncio.Task[None] | None = None  # sends the lines
        self._problem = ""  # the last logged error
        self._taken: set[InputLine] = set()  # lines that have a slot
        self._records: list[tuple[InputLine, Record]] = []  # not stored yet
        self._has_records = asyncio.Event()  # also set when sending has ended

    @property
    def id(self) -> str:
        return self._batch.id

    @property
    def owner(self) -> bytes:
        return self._batch.owner

    def stop(self, why: Stopped) -> None:
        """Stops sending lines. Aborts the lines in flight, unless ``why`` is "leaving"."""
        if self._stopped in ("", "leaving"):
            self._stopped = why
        if self._task is not None and why != "leaving":
            self._task.cancel()

    def leave(self) -> None:
        """Sends no further line. ``run`` returns once those in flight are answered."""
        self.stop("leaving")

    async def look(self) -> None:
        """Stops if the batch was cancelled, has expired, or no longer belongs to this server."""
        batch = await self._rows.owned(self.id, self._server_id)
        if batch is None:
            self.stop("lost")
        elif batch.status == "cancelling":
            self.stop("cancelling")
        elif self._rows.now >= batch.expires:
            self.stop("expired")

    async def _wait(self, error: ChoraleError) -> None:
        """Waits before an operation of the store is retried. A repeated error is logged once."""
        if error.message != self._problem:
            logger.warning("%s waits: %s", self.id, error)
        self._problem = error.message
        await asyncio.sleep(_RETRY_SECONDS)

    async def _answer(self) -> None:
        """Returns once all lines have a record, or after ``leave`` those in flight. Raises ``LostError``."""
        if self._batch.status != "in_progress":
            return
        await self.look()
        done = await self._rows.answered(self.id)
        if len(done) == self._batch.num_lines or self._stopped:
            return
        if done:
            logger.info("%s continues: %d of %d lines are done", self.id, len(done), self._batch.num_lines)
        self._task = sending = asyncio.create_task(self._send(done))
        sending.add_done_callback(lambda _: self._has_records.set())
        try:
            while not sending.done() or self._records:
                await self._has_records.wait()
                self._has_records.clear()
                while self._records:
                    await self._record()
            if not sending.cancelled():
                await sending
        finally:
            self._task = None
            await end_tasks(sending)
            for sent in self._taken:
                self._slots.free(sent.size)
            self._taken.clear()
            self._records.clear()
        self._check_owned()

    def _check_owned(self) -> None:
        if self._stopped == "lost":
            raise LostError

    async def _send(self, done: set[int]) -> None:
        """Sends each line in a separate task. Cancelling this coroutine aborts all lines.

        If reading the input fails, the lines in flight are finished before the error is raised.
        """
        fault: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            try:
                async with contextlib.aclosing(self._lines(done)) as lines:
                    async for sent, line in lines:
                        tasks.create_task(self._execute(sent, line))
            except Exception as error:
                fault = error
        if fault is not None:
            raise fault

    async def _execute(self, sent: InputLine, line: Line) -> None:
        how = self._sending
        self._add(sent, await execute(line, how.send, how.retries, how.ready))

    def _add(self, sent: InputLine, record: Record) -> None:
        self._records.append((sent, record))
        self._has_records.set()

    async def _lines(self, done: set[int]) -> AsyncGenerator[tuple[InputLine, Line]]:
        """Yields lines without a record as slots become free."""
        async with contextlib.aclosing(self._input()) as input_lines:
            async for found in input_lines:
                for number, raw in found:
                    if number in done:
                        continue
                    sent = InputLine(number, len(raw))
                    await self._slots.take(sent.size)
                    self._taken.add(sent)
                    if self._stopped:
                        return
                    parse = partial(parse_line, raw, max_bytes=self._max_line_bytes)
                    yield sent, await asyncio.to_thread(parse) if len(raw) > LARGE else parse()

    def _input(self) -> AsyncGenerator[list[tuple[int, bytes]]]:
        return split_lines(self._read(), self._max_line_bytes)

    async def _record(self) -> None:
        """Stores records, and frees their slots. Raises ``LostError``."""
        group = self._records[:_GROUP]
        results = await asyncio.to_thread(lambda: [packed(sent.number, record) for sent, record in group])
        while True:
            try:
                status = await self._rows.record(self.id, self._server_id, results)
                break
            except StoreError as error:
                await self._wait(error)
        if status is None:
            raise LostError
        if status == "cancelling":
            self.stop("cancelling")
        self._counted(results)
        del self._records[: len(group)]
        for sent, _ in group:
            self._taken.discard(sent)
            self._slots.free(sent.size)


def packed(number: int, record: Record) -> Result:
    """Returns the record of a line in its stored form."""
    used = usage_of(record.answer.body) if record.answer is not None and record.ok else None
    tokens = Tokens() if used is None else Tokens(used.input, used.cached, used.output, used.reasoning)
    return Result(number, record.ok, zlib.compress(record.encode(), 1), tokens)


async def stored(rows: Batches, batch_id: str, completed: bool | None) -> AsyncIterator[bytes]:
    """Yields stored records as JSON lines, in line order. ``completed`` None: all records."""
    after = 0
    while found := await rows.results(batch_id, completed, after, _READ_RECORDS):
        after = found[-1][0]
        yield await asyncio.to_thread(_unpacked, found)


def _unpacked(rows: list[tuple[int, bytes]]) -> bytes:
    return b"".join(zlib.decompress(data) + b"\n" for _, data in rows)
