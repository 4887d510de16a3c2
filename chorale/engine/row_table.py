"""RowTable: the scheduler's view of each row of the device buffers, as arrays.

A row belongs to one sequence from its admission until the sequence has ended or was preempted *and* every
step that names the row is committed; a sequence never changes rows in between. With arrays, a few numpy
operations plan a step over a thousand decoding rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chorale.engine.sequence import Sequence
from chorale.engine.types import BoolArray, IntArray

Int64Array = npt.NDArray[np.int64]


class RowTable:
    """Arrays indexed by row. Other modules read them; only the methods here write to them.

    ``sequences[row]`` stays set until the row is released.
    """

    __slots__ = (
        "computed", "decoding", "drafted", "drafts_on_device", "free", "is_batch", "is_uncertain",
        "last_step", "last_token", "max_len", "needs_slow_path", "next_check_at", "sequences",
    )  # fmt: skip

    def __init__(self, num_rows: int) -> None:
        self.free = list(range(num_rows - 1, -1, -1))
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.computed: IntArray = np.zeros(num_rows, np.int32)  # tokens computed by the plans made so far
        # The value of ``computed`` at which the scheduler checks the row.
        self.next_check_at: IntArray = np.zeros(num_rows, np.int32)
        self.max_len: IntArray = np.zeros(num_rows, np.int32)
        self.last_token: IntArray = np.full(num_rows, -1, np.int32)  # -1: still on the device
        self.last_step: Int64Array = np.full(num_rows, -1, np.int64)  # newest step that names the row
        self.decoding: BoolArray = np.zeros(num_rows, np.bool_)  # computes one token in the next step
        self.needs_slow_path: BoolArray = np.zeros(num_rows, np.bool_)  # first token, log-probabilities
        self.drafted: IntArray = np.zeros(num_rows, np.int32)  # draft tokens made by the newest plan
        self.drafts_on_device: BoolArray = np.zeros(num_rows, np.bool_)  # plans need not contain the drafts
        self.is_batch: BoolArray = np.zeros(num_rows, np.bool_)
        self.is_uncertain: BoolArray = np.zeros(num_rows, np.bool_)  # ``computed`` is an upper bound

    def take(self, sequence: Sequence, num_computed: int, *, drafts_on_device: bool = False) -> int:
        """Assign a free row to a sequence. The caller has checked ``free``."""
        row = self.free.pop()
        self.sequences[row] = sequence
        self.computed[row] = num_computed
        self.max_len[row] = sequence.max_len
        self.needs_slow_path[row] = True
        self.drafted[row] = 0
        self.drafts_on_device[row] = drafts_on_device
        self.is_uncertain[row] = False
        self.is_batch[row] = sequence.is_batch
        return row

    def release(self, row: int) -> None:
        self.sequences[row] = None
        self.free.append(row)

    def set_decoding(self, row: int, decoding: bool) -> None:
        self.decoding[row] = decoding

    def set_next_check(self, row: int, num_computed: int) -> None:
        """Let the scheduler check a decoding row once ``num_computed`` of its tokens are computed."""
        self.next_check_at[row] = num_computed

    def set_slow_path(self, row: int, needed: bool) -> None:
        """Record whether the row's tokens need per-token handling at commit."""
        self.needs_slow_path[row] = needed

    def record_step(self, step_id: int, rows: IntArray, num_new: IntArray) -> None:
        """Count the tokens that a plan computes."""
        self.computed[rows] += num_new
        self.last_step[rows] = step_id

    def record_drafts(self, rows: IntArray, num_made: IntArray | np.int32) -> None:
        """Record how many draft tokens a plan makes for its rows."""
        self.drafted[rows] = num_made

    def doubt(self, rows: IntArray) -> None:
        """Mark rows whose on-device draft is in flight: ``computed`` is uncertain until its result is
        known."""
        self.is_uncertain[rows] = True

    def settle(self, step_id: int, rows: IntArray) -> None:
        """Mark rows as certain again, unless a later step names them."""
        self.is_uncertain[rows[self.last_step[rows] == step_id]] = False

    def take_back(self, row: int, count: int) -> None:
        """Subtract the rejected draft tokens of a plan from the row's computed tokens."""
        self.computed[row] -= count

    def record_tokens(self, rows: IntArray | int, token_ids: IntArray | int) -> None:
        """Record sampled tokens, so that the next plan can contain them."""
        self.last_token[rows] = token_ids
