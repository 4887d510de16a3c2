"""The input file of a batch: its lines, and the check that comes before any of them is sent."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

from chorale.errors import ChoraleError
from chorale.jobs.line import LineError, parse_line

MAX_FAULTS = 100  # that are listed
# A piece of a megabyte may have 350,000 lines; no more of them than are allowed need be made.
_FEED_BYTES = 64 * 2**10
_BOM = b"\xef\xbb\xbf"
_BLANK: Any = re.compile(rb"\s*")  # Any: it always matches


class LineTooLongError(ChoraleError, status=400, code="line_too_large"):
    """A line of the input is longer than a request's body may be. ``line``: its number."""

    def __init__(self, line: int, max_bytes: int) -> None:
        super().__init__(f"the line is longer than {max_bytes} bytes")
        self.line = line


async def split_lines(
    pieces: AsyncGenerator[bytes], max_bytes: int
) -> AsyncGenerator[list[tuple[int, bytes]]]:
    """Yields the numbered lines of each piece, without empty ones. Raises ``LineTooLongError``.

    Closing it closes ``pieces``.
    """
    async with contextlib.aclosing(pieces), contextlib.aclosing(_numbered(pieces, max_bytes)) as numbered:
        async for found in numbered:
            yield found


async def _numbered(pieces: AsyncGenerator[bytes], max_bytes: int) -> AsyncGenerator[list[tuple[int, bytes]]]:
    splitter = _Splitter(max_bytes)
    async for piece in pieces:
        for start in range(0, len(piece), _FEED_BYTES):
            yield await asyncio.to_thread(splitter.feed, piece[start : start + _FEED_BYTES])
    yield splitter.feed(b"\n")


class _Splitter:
    """Cuts pieces into lines. A regular expression skips blank lines: a piece may have a million."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._number = 1  # of the line that begins next
        self._held = bytearray()
        self._first = True

    def feed(self, piece: bytes) -> list[tuple[int, bytes]]:
        """Returns the lines that end in ``piece`` and are not blank. Raises ``LineTooLongError``."""
        piece = piece.removeprefix(_BOM) if self._first else piece
        self._first = False
        ended, end, rest = piece.rpartition(b"\n")
        if end:
            ended, self._held = bytes(self._held) + ended + end, bytearray()
        self._held += rest
        found: list[tuple[int, bytes]] = []
        at, stop = 0, len(ended)
        while (text := _BLANK.match(ended, at).end()) < stop:
            begin = max(at, ended.rfind(b"\n", at, text) + 1)
            self._number += ended.count(b"\n", at, begin)
            at = ended.index(b"\n", text) + 1
            self._check_length(at - 1 - begin)
            found.append((self._number, ended[begin : at - 1]))
            self._number += 1
        self._number += ended.count(b"\n", at)
        self._check_length(len(self._held))
        return found

    def _check_length(self, size: int) -> None:
        if size > self._max_bytes:
            raise LineTooLongError(self._number, self._max_bytes)


@dataclass(slots=True)
class Inspection:
    """The result of a check of an input file. ``faults``: a batch's ``errors``; none: it can be run."""

    num_lines: int = 0
    model: str | None = None  # that all lines name
    faults: list[dict[str, Any]] = field(default_factory=list)
    _seen: set[bytes] = field(default_factory=set)  # digests of custom ids, which may be long

    def add_fault(self, line: int | None, error: ChoraleError) -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(
                {"code": error.code, "line": line, "message": error.message, "param": error.param}
            )

    def add(self, lines: list[tuple[int, bytes]], endpoint: str, max_bytes: int) -> None:
        for number, raw in lines:
            # The list is full and the file is refused: the other lines are only counted.
            if len(self.faults) >= MAX_FAULTS:
                self.num_lines += 1
                continue
            try:
                line = parse_line(raw, endpoints=(endpoint,), max_bytes=max_bytes)
                digest = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16)
                if digest.digest() in self._seen:
                    raise LineError(
                        f"custom_id {line.custom_id[:200]!r} is that of an earlier line",
                        param="custom_id",
                        code="duplicate_custom_id",
                    )
            except LineError as error:
                self.add_fault(number, error)
                self.num_lines += 1
                continue
            self._seen.add(digest.digest())
            self.model = line.model if self.num_lines == 0 or line.model == self.model else None
            self.num_lines += 1


async def inspect(
    pieces: AsyncGenerator[bytes], endpoint: str, *, max_lines: int, max_bytes: int
) -> Inspection:
    """Checks every line, in a thread that works at most half of the time, so that streams continue."""
    found = Inspection()
    try:
        async with contextlib.aclosing(split_lines(pieces, max_bytes)) as all_lines:
            async for lines in all_lines:
                for part in _parts(lines):
                    started = time.perf_counter()
                    await asyncio.to_thread(found.add, part, endpoint, max_bytes)
                    await asyncio.sleep(time.perf_counter() - started)
                    if found.num_lines > max_lines:
                        error = ChoraleError(
                            f"the file has more than {max_lines} lines", code="too_many_tasks"
                        )
                        found.add_fault(None, error)
                        return found
    except LineTooLongError as error:
        found.add_fault(error.line, error)
    if not found.num_lines and not found.faults:
        found.add_fault(None, ChoraleError("the file has no lines", code="empty_file"))
    return found


def _parts(lines: list[tuple[int, bytes]], size: int = 256) -> Iterator[list[tuple[int, bytes]]]:
    for start in range(0, len(lines), size):
        yield lines[start : start + size]
