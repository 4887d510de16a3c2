"""The input file of a batch: splits it into lines, and checks all lines before any is sent."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from chorale.jobs.line import Line, LineError, parse_line

_CHECKED_LINES = 256  # lines checked per call
# Bytes split per call: a piece of 1 MB may have 350,000 lines, far more than a batch may have.
_FEED_BYTES = 64 * 2**10
_BOM = b"\xef\xbb\xbf"
_BLANK: Any = re.compile(rb"\s*")  # Any: ``match`` never returns None


async def split_lines(
    pieces: AsyncGenerator[bytes], max_bytes: int
) -> AsyncGenerator[list[tuple[int, bytes]]]:
    """Yields lists of (number, line), without blank lines. Closing it closes ``pieces``.

    A line longer than ``max_bytes`` is cut, but remains too long for ``parse_line``.
    """
    splitter = _Splitter(max_bytes)
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            for start in range(0, len(piece), _FEED_BYTES):
                yield await asyncio.to_thread(splitter.feed, piece[start : start + _FEED_BYTES])
        yield splitter.feed(b"\n")


class _Splitter:
    """Splits pieces into lines. A regular expression skips blank lines: a piece may have a million."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._number = 1  # number of the next line
        self._unfinished = bytearray()  # beginning of an unfinished line
        self._first = True

    def feed(self, piece: bytes) -> list[tuple[int, bytes]]:
        """Returns the lines that end in ``piece`` and are not blank."""
        piece = piece.removeprefix(_BOM) if self._first else piece
        self._first = False
        ended, end, rest = piece.rpartition(b"\n")
        if end:
            ended, self._unfinished = bytes(self._unfinished) + ended + end, bytearray()
        self._unfinished += rest
        if len(self._unfinished) > self._max_bytes:
            del self._unfinished[self._max_bytes + 1 :]
            self._unfinished[:1] = b"."  # not blank: the line must be refused, not skipped
        found: list[tuple[int, bytes]] = []
        at, stop = 0, len(ended)
        while (text := _BLANK.match(ended, at).end()) < stop:
            begin = max(at, ended.rfind(b"\n", at, text) + 1)
            self._number += ended.count(b"\n", at, begin)
            at = ended.index(b"\n", text) + 1
            found.append((self._number, ended[begin : at - 1]))
            self._number += 1
        self._number += ended.count(b"\n", at)
        return found


@dataclass(slots=True)
class Inspection:
    """Checks each line of an input, and that no ``custom_id`` is used twice.

    ``model``: the model that all lines name, or None. ``busy_share``: share of the time in which a thread may
    work, so that the streams of a server continue.
    """

    endpoints: tuple[str, ...]
    max_bytes: int
    busy_share: float = 0.5
    num_lines: int = 0
    model: str | None = None
    _seen: set[bytes] = field(default_factory=set)  # digests of custom ids, which may be long

    async def read(self, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[list[tuple[int, LineError]]]:
        """Yields lists of (number, error) of faulty lines."""
        async with contextlib.aclosing(split_lines(pieces, self.max_bytes)) as all_lines:
            async for lines in all_lines:
                for start in range(0, len(lines), _CHECKED_LINES):
                    began = time.perf_counter()
                    faults = await asyncio.to_thread(self.add, lines[start : start + _CHECKED_LINES])
                    await asyncio.sleep((time.perf_counter() - began) * (1 / self.busy_share - 1))
                    yield faults

    def add(self, lines: list[tuple[int, bytes]]) -> list[tuple[int, LineError]]:
        """Counts and checks lines. Returns (number, error) of faulty ones."""
        faults = []
        for number, raw in lines:
            try:
                line = self._checked(raw)
            except LineError as error:
                faults.append((number, error.with_traceback(None)))  # frames are large
            else:
                self.model = line.model if self.num_lines == 0 or line.model == self.model else None
            self.num_lines += 1
        return faults

    def _checked(self, raw: bytes) -> Line:
        line = parse_line(raw, endpoints=self.endpoints, max_bytes=self.max_bytes)
        custom_id = line.custom_id.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(custom_id, digest_size=16).digest()
        if digest in self._seen:
            error = LineError(
                f"custom_id {line.custom_id[:200]!r} is already used by an earlier line",
                param="custom_id",
                code="duplicate_custom_id",
            )
            error.custom_id = line.custom_id
            raise error
        self._seen.add(digest)
        return line
