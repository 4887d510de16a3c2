"""The input file of a batch: its lines, and the check that comes before any of them is sent."""

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

_PART = 256  # lines that are checked at a time
# A piece of a megabyte may have 350,000 lines; no more of them than are allowed need be made.
_FEED_BYTES = 64 * 2**10
_BOM = b"\xef\xbb\xbf"
_BLANK: Any = re.compile(rb"\s*")  # Any: it always matches


async def split_lines(
    pieces: AsyncGenerator[bytes], max_bytes: int
) -> AsyncGenerator[list[tuple[int, bytes]]]:
    """Yields the numbered lines of each piece, without empty ones. Closing it closes ``pieces``.

    Of a line above ``max_bytes`` only the beginning is kept, which is still too long for ``parse_line``.
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
        """Returns the lines that end in ``piece`` and are not blank."""
        piece = piece.removeprefix(_BOM) if self._first else piece
        self._first = False
        ended, end, rest = piece.rpartition(b"\n")
        if end:
            ended, self._held = bytes(self._held) + ended + end, bytearray()
        self._held += rest
        if len(self._held) > self._max_bytes:
            del self._held[self._max_bytes + 1 :]
            self._held[:1] = b"."  # it is refused by its length, also if it begins with blanks
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
    """Checks the lines of an input, each by itself and for a ``custom_id`` that an earlier one has.

    ``model``: that all lines name, or None. ``busy_share`` of the time a thread works, so that the streams of
    a server continue.
    """

    endpoints: tuple[str, ...]
    max_bytes: int
    busy_share: float = 0.5
    num_lines: int = 0
    model: str | None = None
    _seen: set[bytes] = field(default_factory=set)  # digests of custom ids, which may be long

    async def read(self, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[list[tuple[int, LineError]]]:
        """Yields the numbers and errors of faulty lines, part by part."""
        async with contextlib.aclosing(split_lines(pieces, self.max_bytes)) as all_lines:
            async for lines in all_lines:
                for start in range(0, len(lines), _PART):
                    began = time.perf_counter()
                    faults = await asyncio.to_thread(self.add, lines[start : start + _PART])
                    await asyncio.sleep((time.perf_counter() - began) * (1 / self.busy_share - 1))
                    yield faults

    def add(self, lines: list[tuple[int, bytes]]) -> list[tuple[int, LineError]]:
        """Counts lines. Returns those with a fault."""
        faults = []
        for number, raw in lines:
            try:
                line = self._checked(raw)
            except LineError as error:
                faults.append((number, error))
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
                f"custom_id {line.custom_id[:200]!r} is that of an earlier line",
                param="custom_id",
                code="duplicate_custom_id",
            )
            error.custom_id = line.custom_id
            raise error
        self._seen.add(digest)
        return line
