"""BatchWork: one batch, from its claim by this server to its end, or until this server leaves it.

The steps follow the batch's status. Another server can repeat each of them: it checks the input again, sends
the lines without a record, and writes the files again under new ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

from chorale.config.engine import ServerConfig
from chorale.errors import ChoraleError
from chorale.jobs.contents import Contents, ContentsError, MissingContentError
from chorale.jobs.input import Inspection
from chorale.jobs.line import Record, parse_line
from chorale.jobs.lines import LineWork, LostError, Sending, stored
from chorale.store.batch_rows import BatchNotFoundError, Result, StoredBatch
from chorale.store.batches import MAX_ATTEMPTS
from chorale.store.files import StoredFile, new_file_id
from chorale.store.protocol import StoreError
from chorale.store.store import ResponseStore

logger = logging.getLogger(__name__)

MAX_FAULTS = 100  # most faults of an input that are listed
_FAULT_OF_STATUS = {
    "expired": ChoraleError("the batch expired before this request was answered", code="batch_expired"),
    "cancelled": ChoraleError(
        "the batch was cancelled before this request was answered", code="batch_cancelled"
    ),
}


class BatchWork(LineWork):
    """A batch of a server. ``sending``: sends lines as the owner of the batch. ``config``: the server's."""

    def __init__(
        self,
        batch: StoredBatch,
        store: ResponseStore,
        contents: Contents,
        server_id: str,
        *,
        sending: Sending,
        config: ServerConfig,
        counted: Callable[[Sequence[Result]], None],
    ) -> None:
        super().__init__(
            batch,
            store.batches,
            server_id,
            partial(contents.read, batch.input_file_id),
            sending=sending,
            max_line_bytes=config.max_body_bytes,
            counted=counted,
        )
        self._files, self._contents = store.files, contents
        self._max_lines, self._lifetime = config.batch_max_lines, config.batch_ttl

    async def run(self) -> None:
        """Runs the batch until it has ended or this server leaves it. Raises ``LostError``."""
        started = time.monotonic()
        if self._batch.attempts > MAX_ATTEMPTS:
            await self._fail(
                [_fault("server_error", f"{self._batch.attempts} servers stopped while they ran this batch")]
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
        """Runs a step, with retries while the store or the storage of contents fails."""
        while True:
            try:
                await step()
                return
            except MissingContentError as error:
                await self._fail([_fault("input_file_missing", error.message)])
                return
            except (StoreError, ContentsError) as error:
                await self._wait(error)

    async def _refresh(self) -> None:
        """Reads the batch again, even if it has ended. Raises ``LostError`` if it was deleted."""
        while True:
            try:
                self._batch = await self._rows.get(self.id, self._batch.owner)
                return
            except BatchNotFoundError:
                raise LostError from None
            except StoreError as error:
                await self._wait(error)

    # ------------------------------------------------------------------ validation

    async def _validate(self) -> None:
        batch = self._batch
        if batch.status != "validating":
            return
        found = Inspection((batch.endpoint,), self._max_line_bytes)
        faults = await self._faults(found)
        if faults:
            await self._fail(faults[:MAX_FAULTS])
            return
        if not await self._rows.begin(self.id, self._server_id, found.num_lines, found.model):
            raise LostError
        logger.info("%s begins: %d lines for %s", self.id, found.num_lines, batch.endpoint)

    async def _faults(self, found: Inspection) -> list[dict[str, Any]]:
        faults: list[dict[str, Any]] = []
        most = self._max_lines
        async with contextlib.aclosing(found.read(self._read())) as checked:
            async for new in checked:
                faults += [_fault(str(e.code), e.message, line, e.param) for line, e in new]
                if found.num_lines > most:
                    faults.append(_fault("too_many_tasks", f"the file has more than {most} lines"))
                if len(faults) >= MAX_FAULTS or found.num_lines > most:
                    return faults
        if not found.num_lines:
            faults.append(_fault("empty_file", "the file has no lines"))
        return faults

    async def _fail(self, faults: list[dict[str, Any]]) -> None:
        if not await self._rows.end(self.id, self._server_id, "failed", faults=faults):
            raise LostError
        self._batch = replace(self._batch, status="failed")
        logger.warning("%s has failed: %s", self.id, faults[0]["message"])

    # ------------------------------------------------------------------ output files

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
            output = await self._write("output", self._records_of(True))
        if batch.num_failed or num_left:
            errors = await self._write("error", self._records_of(False, done, _FAULT_OF_STATUS.get(status)))
        if not await self._rows.end(
            self.id, self._server_id, status, output=output, errors=errors, num_failed=num_left
        ):
            raise LostError

    async def _write(self, kind: str, pieces: AsyncIterator[bytes]) -> StoredFile:
        """Writes a file, which becomes visible when the batch ends."""
        now = self._files.now
        lifetime = self._batch.body.get("output_seconds") or self._lifetime
        file = StoredFile(
            new_file_id(), self.owner, now, now + lifetime, "batch_output", f"{self.id}_{kind}.jsonl", 0
        )
        await self._files.begin(file, self._server_id)
        try:
            return replace(file, num_bytes=await self._contents.write(file.id, pieces))
        except ChoraleError:
            await self._files.drop(file.id)
            raise

    async def _records_of(
        self, completed: bool, done: Set[int] = frozenset(), fault: ChoraleError | None = None
    ) -> AsyncIterator[bytes]:
        """Yields stored records in line order, then a record with ``fault`` for each line without one."""
        async for records in stored(self._rows, self.id, completed):
            yield records
        if fault is None:
            return
        async with contextlib.aclosing(self._input()) as input_lines:
            async for lines in input_lines:
                left = [raw for number, raw in lines if number not in done]
                yield await asyncio.to_thread(_unanswered, left, fault, self._max_line_bytes)


def _fault(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "line": line, "message": message, "param": param}


def _unanswered(lines: list[bytes], fault: ChoraleError, max_bytes: int) -> bytes:
    ids = (parse_line(raw, max_bytes=max_bytes).custom_id for raw in lines)
    return b"".join(Record(custom_id, fault=fault).encode() + b"\n" for custom_id in ids)
