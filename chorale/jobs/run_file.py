"""FileRun: one batch from an input to an output by this process, resumed from its journal."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from chorale.errors import ChoraleError
from chorale.jobs.execute import PATIENT, Sender, execute_all
from chorale.jobs.files import Source, lines_of
from chorale.jobs.journal import Journal
from chorale.jobs.line import MAX_LINE_BYTES, Line, LineError, parse_line, refused
from chorale.requests.openai_client import Retries
from chorale.requests.usage import TokenUsage, usage_of

_TURN = 64  # lines that are read before other tasks get a turn


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw = msgspec.Raw()


class _Error(msgspec.Struct):
    code: str = ""


class _Outcome(msgspec.Struct):
    response: _Response | None
    error: _Error | None


_outcome = msgspec.json.Decoder(_Outcome)


@dataclass(slots=True)
class Tally:
    """Counts of records. ``failures``: by HTTP status or by the error's code."""

    num_lines: int = 0
    num_ok: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    usage: TokenUsage = field(default_factory=TokenUsage)

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    def add(self, record: bytes) -> None:
        """Counts an encoded record."""
        self.num_lines += 1
        found = _outcome.decode(record)
        if found.error is not None:
            self.failures[found.error.code] += 1
        elif found.response is None or not 200 <= found.response.status_code < 300:
            self.failures[f"HTTP {0 if found.response is None else found.response.status_code}"] += 1
        else:
            self.num_ok += 1
            self.usage += usage_of(bytes(found.response.body))


class ServerGoneError(ChoraleError, code="server_gone"):
    """The server has stopped answering: no line was answered while one was sent again and again."""


class FileRun:
    """Sends the lines of ``source`` that ``journal`` lacks, and adds their records to it.

    ``before`` counts the records of earlier runs, ``now`` those of this one. ``on_record`` is called after
    each record.
    """

    def __init__(
        self,
        source: Source,
        journal: Journal,
        *,
        retries: Retries = PATIENT,
        max_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._source, self._journal, self._retries = source, journal, retries
        self._max_bytes = max_bytes
        self.on_record: Callable[[], None] = lambda: None
        self.before, self.now = Tally(), Tally()
        for record in journal.records():
            self.before.add(record)
        self._stopping = self._all_read = False
        self._task: asyncio.Task[None] | None = None
        self._last_answer = time.monotonic()
        self.complete = False  # every line has a record

    def stop(self) -> None:
        """First call: no further line is sent, and those in flight are finished. Second call: aborts them."""
        if self._stopping and self._task is not None:
            self._task.cancel()
        self._stopping = True

    async def run(self, send: Sender, concurrency: int) -> None:
        """Returns once all lines are done, or those in flight after ``stop``. Raises ``ServerGoneError``."""
        self._task = asyncio.ensure_future(self._run(send, concurrency))
        try:
            await self._task
        except asyncio.CancelledError:
            if not self._stopping:
                self._task.cancel()
                raise

    async def _run(self, send: Sender, concurrency: int) -> None:
        self._last_answer = time.monotonic()
        records = execute_all(self._lines(), send, concurrency=concurrency, retries=self._retries)
        async with self._journal.synced(), aclosing(records):
            async for number, record in records:
                if record.answer is not None:
                    self._last_answer = time.monotonic()
                elif time.monotonic() - self._last_answer > self._retries.patience / 2:
                    assert record.fault is not None
                    raise ServerGoneError(
                        f"{record.fault.message}; {self._journal.num_done} lines are done; the same command "
                        "sends the others"
                    )
                self._add(number, record.encode())
        self.complete = self._all_read

    async def _lines(self) -> AsyncGenerator[tuple[int, Line]]:
        """Yields the lines to send, and records those that cannot be sent."""
        seen: set[bytes] = set()
        for count, (number, raw) in enumerate(lines_of(self._source.path, self._max_bytes)):
            if self._stopping:
                return
            if count % _TURN == 0:
                await asyncio.sleep(0)
            try:
                line = parse_line(raw, max_bytes=self._max_bytes)
                _check_new(line, seen)
            except LineError as error:
                if not self._journal.has(number):
                    self._add(number, refused(error).encode())
                continue
            if not self._journal.has(number):
                yield number, line
        self._all_read = True

    def _add(self, number: int, record: bytes) -> None:
        self._journal.add(number, record)
        self.now.add(record)
        self.on_record()


def _check_new(line: Line, seen: set[bytes]) -> None:
    """Raises ``LineError`` if an earlier line has the same custom_id, which would make answers ambiguous."""
    digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
    if digest in seen:
        error = LineError(
            f"custom_id {line.custom_id[:200]!r} is that of an earlier line", code="duplicate_custom_id"
        )
        error.custom_id = line.custom_id
        raise error
    seen.add(digest)
