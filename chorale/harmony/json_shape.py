"""Depth and counts of a JSON body, determined on its bytes before parsing.

A parser holds the interpreter lock while it reads a flat container or a string with escapes, and later code
walks the result; limits on counts bound both. Counting with numpy takes a few milliseconds per megabyte, in
slices between which other threads run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_SLICE = 262_144  # bytes
_QUOTE, _COLON, _COMMA = (ord(mark) for mark in '":,')
_OTHERS = bytes(set(range(256)) - set(b'"[]{}:,'))
_STEP_OF = np.zeros(256, dtype=np.int8)  # +1 for opening brackets, -1 for closing ones
_STEP_OF[list(b"[{")] = 1
_STEP_OF[list(b"]}")] = -1

Marks = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Shape:
    """Counts of a JSON text; undefined for invalid JSON. All but ``escapes`` are counted outside strings."""

    depth: int = 0  # deepest nesting of objects and arrays
    values: int = 0  # values of all kinds, without member names; an empty container counts twice
    strings: int = 0  # strings, including member names
    containers: int = 0  # objects and arrays
    members: int = 0  # members of the largest object
    escapes: int = 0  # backslash sequences; a parser copies a string in pieces between them

    def excess(self, most: Shape) -> str | None:
        """Returns the name of the first count, in field order, that exceeds the one in ``most``."""
        return next((name for name in self.__slots__ if getattr(self, name) > getattr(most, name)), None)


# With these counts a parser holds the lock for less than 50 ms. Each caller sets its own depth.
LARGEST = Shape(
    depth=2**15 - 1,
    values=262_144,
    strings=131_072,
    containers=65_536,
    members=16_384,
    escapes=1_048_576,
)


def shape_of(raw: bytes, most: Shape) -> Shape:
    """Returns the counts of ``raw`` in linear time. Stops at the first slice that exceeds ``most``."""
    found = Shape(values=1)
    level, num_members, kept = 0, 0, []
    narrow = np.int16 if most.depth < 2**15 else np.int32  # 16-bit integers are sorted in linear time
    for marks, num_strings, num_escapes in _structure(raw):
        found.escapes += num_escapes
        levels = level + np.cumsum(_STEP_OF[marks], dtype=np.int32)
        opens = _STEP_OF[marks] == 1
        found.strings += num_strings
        if marks.size:
            level = int(levels[-1])
            found.depth = max(found.depth, int(levels.max()))
            num_opens, colons = int(np.count_nonzero(opens)), marks == _COLON
            found.containers += num_opens
            # A non-empty container has one more value than commas.
            found.values += int(np.count_nonzero(marks == _COMMA)) + num_opens
            num_members += int(np.count_nonzero(colons))
            some = opens | colons
            kept.append((levels[some].astype(narrow), opens[some]))
        if found.excess(most) is not None:
            return found
    if num_members > most.members:
        found.members = _most_members(*(np.concatenate(columns) for columns in zip(*kept, strict=True)))
    return found


def _structure(raw: bytes) -> Iterator[tuple[Marks, int, int]]:
    """Yields, per slice, the structural marks outside strings, the number of strings begun and of escapes.

    Removes escapes first: backslashes pair up from the left of a run, so an odd one before a quote escapes
    the quote. The remaining quotes delimit strings.
    """
    carried, inside = b"", False
    for start in range(0, len(raw), _SLICE):
        piece = carried + raw[start : start + _SLICE]
        carried = b""
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            carried, piece = b"\\", piece[:-1]
        num_escapes = 0
        if b"\\" in piece:
            length = len(piece)
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            num_escapes = (length - len(piece)) // 2 + piece.count(b"\\")
        marks = np.frombuffer(piece.translate(None, _OTHERS), dtype=np.uint8)
        if not marks.size:
            yield marks, 0, num_escapes
            continue
        quotes = marks == _QUOTE
        in_string = np.logical_xor.accumulate(quotes) ^ inside
        num_quotes = int(np.count_nonzero(quotes))
        yield marks[~(in_string | quotes)], (num_quotes + (not inside)) // 2, num_escapes
        inside = bool(in_string[-1])


def _most_members(levels: npt.NDArray[np.signedinteger[Any]], opens: npt.NDArray[np.bool_]) -> int:
    """Returns the most members of any object, from the positions of opening brackets and colons.

    After sorting by level, each container's colons follow its opening bracket.
    """
    order = np.argsort(levels, kind="stable")
    opens = opens[order]
    container = np.cumsum(opens, dtype=np.int64)
    return int(np.bincount(container[~opens]).max(initial=0))
