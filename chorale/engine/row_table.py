"""RowTable: what the scheduler knows about each row of the device buffers, as arrays.

A row belongs to one sequence from its admission until it ends or is preempted *and* every step that names
the row has been committed; rows never move meanwhile. The arrays let a step over a thousand decoding rows
be planned by a handful of numpy operations.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chorale.engine.sequence import Sequence
from chorale.engine.types import BoolArray, IntArray

Int64Array = npt.NDArray[np.int64]


class RowTable:
    """Arrays are indexed by row. ``sequences[row]`` stays set until the row is released."""

    __slots__ = (
        "computed",
        "decoding",
        "free",
        "last_step",
        "last_token",
        "max_len",
        "needs_slow_path",
        "next_check_at",
        "sequences",
    )

    def __init__(self, num_rows: int) -> None:
        self.free = list(range(num_rows - 1, -1, -1))
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.computed: IntArray = np.zeros(num_rows, np.int32)  # tokens computed by the plans made so far
        self.next_check_at: IntArray = np.zeros(
            num_rows, np.int32
        )  # at this ``computed`` the row needs a look
        self.max_len: IntArray = np.zeros(num_rows, np.int32)
        self.last_token: IntArray = np.full(num_rows, -1, np.int32)  # -1: only the device has it
        self.last_step: Int64Array = np.full(num_rows, -1, np.int64)  # the newest plan that names the row
        self.decoding: BoolArray = np.zeros(num_rows, np.bool_)
        self.needs_slow_path: BoolArray = np.zeros(num_rows, np.bool_)  # its tokens take the slow way out

    def take(self, sequence: Sequence, num_computed: int) -> int:
        """Give a free row to a sequence. The caller has checked ``free``."""
        row = self.free.pop()
        self.sequences[row] = sequence
        self.computed[row] = num_computed
        self.max_len[row] = sequence.max_len
        self.needs_slow_path[row] = True
        return row

    def release(self, row: int) -> None:
        self.sequences[row] = None
        self.free.append(row)
