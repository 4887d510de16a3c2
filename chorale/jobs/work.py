"""BatchWork: one batch, from its claim by this server to its end, or until this server leaves it.

The steps are those of the batch's status. Each can be begun again by another server: the input is checked
again, lines without a record are sent (again), the files are written anew under new ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from chorale.errors import ChoraleError
from chorale.jobs.contents import Contents, ContentsError, MissingContentError
from chorale.jobs.execute import Sender, execute_all
from chorale.jobs.input import inspect, split_lines
from chorale.jobs.line import LARGE, Fault, Line, Record, parse_line
from chorale.jobs.slots import Slots
from chorale.requests.openai_client import Retries
from chorale.requests.usage import usage_of
from chorale.store.batch_rows import Result, StoredBatch, Tokens
from chorale.store.batches import MAX_ATTEMPTS
from chorale.store.files import StoredFile, new_file_id
from chorale.store.protocol import StoreError
from chorale.store.store import ResponseStore

logger = logging.getLogger(__name__)

_GROUP = 256  # records stored by one write at most
_PAGE = 64  # records read at a time for a file
_RETRY_SECONDS = 1.0
_SHORT_OF = {
    "expired": Fault("batch_expired", "the batch expired before this request was answered"),
    "cancelled": Fault("batch_cancelled", "the batch was cancelled before this request was answered"),
}

Stopped = Literal["", "cancelling", "expired", "lost", "leaving"]


class LostError(Exception):
    """The batch belongs to another server now, or was deleted."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """``ttl``: seconds for which output files, and the batches themselves, are kept."""

    max_lines: int = 50_000
    max_line_bytes: int = 16 * 2**20
    ttl: float = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class _Place:
    number: int
    size: int


class BatchWork:
    """``sender``: sends lines as the owner of the batch. ``counted`` gets the numbers of requests that have
    succeeded and failed."""

    def __init__(
        self,
        batch: StoredBatch,
        store: ResponseStore,
        contents: Contents,
        server_id: str,
        *,
        sender: Sender,
        slots: Slots,
        concurrency: int,
        limits: BatchLimits,
        counted: Callable[[int, int], None],
    ) -> None:
        self._batch = batch
        self._rows, self._files, self._contents = store.batches, store.files, contents
        self._server_id = server_id
        self._sender, self._slots, self._concurrency, self._limits = sender, slots, concurrency, limits
        self._counted = counted
        self._stopped: Stopped = ""
        self._sending: asyncio.Task[None] | None = None
        self._problem = ""  # the last logged error
        self._held: set[_Place] = set()  # lines with a slot
        self._records: list[tuple[_Place, Record]] = []  # not stored yet
        self._has_records = asyncio.Event()  # or sending has ended

    @property
    def id(self) -> str:
        return self._batch.id

    @property
    def owner(self) -> bytes:
        return self._batch.owner

    def stop(self, why: Stopped) -> None:
        """Stops sending lines; what is in flight is aborted, unless this server only leaves the batch."""
        if self._stopped in ("", "leaving"):
            self._stopped = why
        if self._sending is not None and why != "leaving":
            self._sending.cancel()

    def leave(self) -> None:
        """Sends no further line. ``run`` returns once those in flight are answered."""
        self.stop("leaving")

    async def look(self) -> None:
        """Reads whether the batch was cancelled, has expired, or is another server's."""
        batch = await self._rows.owned(self.id, self._server_id)
        if batch is None:
            self.stop("lost")
        elif batch.status == "cancelling":
            self.stop("cancelling")
        elif self._rows.now >= batch.expires:
            self.stop("expired")

    async def run(self) -> None:
        """Works until the batch has ended, or this server leaves it. Raises ``LostError``."""
        started = time.monotonic()
        if self._batch.attempts > MAX_ATTEMPTS:
            await self._fail(
                [_fault("server_error", f"{self._batch.attempts} servers ended while they worked on it")]
            )
            return
        for step in (self._validate, self._answer, self._finish):
            await self._retried(step)
            if self._stopped == "leaving":
                return
            await self._refresh()
            if self._batch.status == "failed":
                return
        logger.info(
            "%s has ended: %s, %d lines completed and %d failed of %d, %.1f s on this server",
            self.id, self._batch.status, self._batch.num_completed, self._batch.num_failed,
            self._batch.num_lines, time.monotonic() - started,
        )  # fmt: skip

    async def _retried(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeats a step while the store or the place of the contents fails."""
        while True:
            try:
                await step()
                return
            except MissingContentError as error:
                await self._fail([_fault("input_file_missing", error.message)])
                return
            except (StoreError, ContentsError) as error:
                await self._wait(error)

    async def _wait(self, error: ChoraleError) -> None:
        """Waits before a step is repeated. Each error is logged once."""
        if error.message != self._problem:
            logger.warning("%s waits: %s", self.id, error)
        self._problem = error.message
        await asyncio.sleep(_RETRY_SECONDS)

    async def _refresh(self) -> None:
        """Reads the batch again, also once it has ended. Raises ``LostError``."""
        while True:
            try:
                self._batch = await self._rows.get(self.id, self._batch.owner)
                return
            except StoreError as error:
                await self._wait(error)

    # ------------------------------------------------------------------ validation

    async def _validate(self) -> None:
        batch, limits = self._batch, self._limits
        if batch.status != "validating":
            return
        found = await inspect(
            self._contents.read(batch.input_file_id),
            batch.endpoint,
            max_lines=limits.max_lines,
            max_bytes=limits.max_line_bytes,
        )
        if found.faults:
            await self._fail(found.faults)
            return
        if not await self._rows.begin(self.id, self._server_id, found.num_lines, found.model):
            raise LostError
        logger.info("%s begins: %d lines for %s", self.id, found.num_lines, batch.endpoint)

    async def _fail(self, faults: list[dict[str, Any]]) -> None:
        if not await self._rows.end(self.id, self._server_id, "failed", faults=faults):
            raise LostError
        self._batch = replace(self._batch, status="failed")
        logger.warning("%s has failed: %s", self.id, faults[0]["message"])

    # ------------------------------------------------------------------ the lines

    async def _answer(self) -> None:
        if self._batch.status != "in_progress":
            return
        await self.look()
        done = await self._rows.answered(self.id)
        if len(done) == self._batch.num_lines or self._stopped:
            return
        if done:
            logger.info("%s continues: %d of %d lines are done", self.id, len(done), self._batch.num_lines)
        self._sending = sending = asyncio.create_task(self._send(done))
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
            self._sending = None
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            for place in self._held:
                self._slots.free(place.size)
            self._held.clear()
            self._records.clear()
        self._check_owned()

    def _check_owned(self) -> None:
        if self._stopped == "lost":
            raise LostError

    async def _send(self, done: set[int]) -> None:
        lines = self._lines(done)
        records = execute_all(lines, self._sender, concurrency=self._concurrency, retries=Retries(1))
        async with contextlib.aclosing(lines), contextlib.aclosing(records):
            async for place, record in records:
                self._records.append((place, record))
                self._has_records.set()

    async def _lines(self, done: set[int]) -> AsyncGenerator[tuple[_Place, Line]]:
        """Yields lines without a record as slots become free."""
        limits = self._limits
        async with contextlib.aclosing(self._input()) as input_lines:
            async for found in input_lines:
                for number, raw in found:
                    if number in done:
                        continue
                    place = _Place(number, len(raw))
                    await self._slots.take(place.size)
                    self._held.add(place)
                    if self._stopped:
                        return
                    parse = partial(parse_line, raw, max_bytes=limits.max_line_bytes)
                    yield place, await asyncio.to_thread(parse) if len(raw) > LARGE else parse()

    def _input(self) -> AsyncGenerator[list[tuple[int, bytes]]]:
        return split_lines(self._contents.read(self._batch.input_file_id), self._limits.max_line_bytes)

    async def _record(self) -> None:
        """Stores records, and frees their slots. Raises ``LostError``."""
        group = self._records[:_GROUP]
        results = await asyncio.to_thread(lambda: [_packed(place, record) for place, record in group])
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
        num_completed = sum(result.completed for result in results)
        self._counted(num_completed, len(results) - num_completed)
        del self._records[: len(group)]
        for place, _ in group:
            self._held.discard(place)
            self._slots.free(place.size)

    # ------------------------------------------------------------------ the files

    async def _finish(self) -> None:
        if self._batch.status not in ("in_progress", "finalizing", "cancelling"):
            return
        if not await self._rows.finalize(self.id, self._server_id):
            raise LostError
        await self._refresh()
        batch = self._batch
        done = await self._rows.answered(self.id)
        status = "cancelled" if batch.status == "cancelling" else "completed"
        num_left = batch.num_lines - len(done)
        if num_left and status == "completed":
            status = "expired"
        output = errors = None
        if batch.num_completed:
            output = await self._write("output", self._pages(True))
        if batch.num_failed or num_left:
            errors = await self._write("error", self._pages(False, done, _SHORT_OF.get(status)))
        if not await self._rows.end(
            self.id, self._server_id, status, output=output, errors=errors, num_failed=num_left
        ):
            raise LostError

    async def _write(self, kind: str, pieces: AsyncIterator[bytes]) -> StoredFile:
        """Writes a file, which becomes visible when the batch ends."""
        now = self._files.now
        lifetime = self._batch.body.get("output_seconds") or self._limits.ttl
        file = StoredFile(
            new_file_id(), self.owner, now, now + lifetime, "batch_output", f"{self.id}_{kind}.jsonl", 0
        )
        await self._files.begin(file, self._server_id)
        try:
            return replace(file, num_bytes=await self._contents.write(file.id, pieces))
        except ChoraleError:
            await self._files.drop(file.id)
            raise

    async def _pages(
        self, completed: bool, done: Set[int] = frozenset(), fault: Fault | None = None
    ) -> AsyncIterator[bytes]:
        """Yields the records in the order of their lines; then those of lines that were never answered."""
        after = 0
        while page := await self._rows.results(self.id, completed, after, _PAGE):
            after = page[-1][0]
            yield await asyncio.to_thread(_unpacked, page)
        if fault is None:
            return
        async with contextlib.aclosing(self._input()) as input_lines:
            async for lines in input_lines:
                left = [raw for number, raw in lines if number not in done]
                yield await asyncio.to_thread(_unanswered, left, fault, self._limits.max_line_bytes)


def _fault(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "line": None, "message": message, "param": None}


def _packed(place: _Place, record: Record) -> Result:
    used = usage_of(record.answer.body) if record.answer is not None and record.ok else None
    tokens = Tokens() if used is None else Tokens(used.input, used.cached, used.output, used.reasoning)
    return Result(place.number, record.ok, zlib.compress(record.encode(), 1), tokens)


def _unpacked(page: list[tuple[int, bytes]]) -> bytes:
    return b"".join(zlib.decompress(data) + b"\n" for _, data in page)


def _unanswered(lines: list[bytes], fault: Fault, max_bytes: int) -> bytes:
    ids = (parse_line(raw, max_bytes=max_bytes).custom_id for raw in lines)
    return b"".join(Record(custom_id, fault=fault).encode() + b"\n" for custom_id in ids)
