"""How deep, how wide and how full a JSON body is: counted on its bytes, before a parser sees it.

A parser holds the interpreter's lock while it reads a flat container or a string with escapes, and what
comes after it walks what it has read; all are bounded by counts, not by bytes. Counting takes numpy some
milliseconds a megabyte, in slices between which other threads run.
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
_STEP_OF = np.zeros(256, dtype=np.int8)  # +1 for an opening bracket, -1 for a closing one
_STEP_OF[list(b"[{")] = 1
_STEP_OF[list(b"]}")] = -1

Marks = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Shape:
    """Counts outside of strings, except for escapes. Of input that is not JSON they mean nothing."""

    depth: int = 0  # deepest nesting of objects and arrays
    values: int = 0  # of every kind, names of members not included; an empty container counts twice
    strings: int = 0  # names of members included
    containers: int = 0  # objects and arrays
    members: int = 0  # of the object that has most
    escapes: int = 0  # backslash sequences: a parser copies a string piece by piece between them

    def excess(self, most: Shape) -> str | None:
        """The first count, in the order of the fields, that is above ``most``'s."""
        return next((name for name in self.__slots__ if getattr(self, name) > getattr(most, name)), None)


def shape_of(raw: bytes, most: Shape) -> Shape:
    """Linear and without recursion. Stops counting at the first slice that exceeds ``most``."""
    found = Shape(values=1)
    level, num_members, kept = 0, 0, []
    narrow = np.int16 if most.depth < 2**15 else np.int32  # two bytes are sorted in linear time
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
            # A container that is not empty holds one value more than commas.
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
    """Slice by slice: the marks outside of strings but for quotes, how many strings began, how many escapes.

    Escapes go first: a run of backslashes pairs up from its left, so what is left before a quote escapes it.
    Then quotes only open and close strings.
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
    """Members of the fullest object, from the opening brackets and colons of a body.

    Sorted by level, each container's colons follow its opening bracket.
    """
    order = np.argsort(levels, kind="stable")
    opens = opens[order]
    container = np.cumsum(opens, dtype=np.int64)
    return int(np.bincount(container[~opens]).max(initial=0))
