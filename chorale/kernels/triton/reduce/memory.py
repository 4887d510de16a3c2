"""The layout of the memory that all ranks can write to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chorale.kernels.triton import tuning
from chorale.kernels.triton.reduce.words import EMPTY
from chorale.parallel.peer_memory import PeerMemory

ROW_WORDS = 32  # of a rank's row in an exchange of few numbers (``rows.py``)
EXCHANGED_ROWS = 1024  # of such an exchange at most


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in bytes of what the kernels keep in a ``PeerMemory``. The same on all ranks."""

    size: int  # ranks
    hidden: int
    tokens: int  # of the largest step
    few: int  # rows of the largest one-shot call
    dtype: torch.dtype  # of the model: what norms and parts are rounded to

    @property
    def few_from(self) -> int:
        """Bytes of a sender's words, one-shot; rows are as far apart as float32 ones."""
        return self.few * self.hidden * 4

    @property
    def rows(self) -> int:
        """Most rows of an owner, two-shot."""
        return -(-self.tokens // self.size)

    @property
    def many_from(self) -> int:
        """Bytes of a sender's words, two-shot."""
        return self.rows * self.hidden * self.dtype.itemsize

    @property
    def words(self) -> int:
        """Words of two-shot calls."""
        return 2 * self.size * self.few_from

    @property
    def normed(self) -> int:
        return self.words + self.size * self.many_from

    @property
    def whole(self) -> int:
        return self.normed + self.tokens * self.hidden * self.dtype.itemsize

    @property
    def flags(self) -> int:
        return self.whole + self.tokens * self.hidden * 4

    @property
    def numbers(self) -> int:
        """Words of exchanges of few numbers a row."""
        return self.flags + self.size * tuning.REDUCE_FLAGS * 4

    @property
    def exchanged(self) -> int:
        """Most rows of an exchange of few numbers a row."""
        return min(self.tokens, EXCHANGED_ROWS)

    @property
    def num_bytes(self) -> int:
        return self.numbers + 2 * self.size * self.exchanged * ROW_WORDS * 4

    def prepare(self, memory: PeerMemory) -> None:
        """Makes all words empty and all flags zero, on all ranks, which all call this."""
        memory.buffer[: self.normed // 4].fill_(EMPTY.value)
        memory.buffer[self.flags // 4 : self.numbers // 4].zero_()
        memory.buffer[self.numbers // 4 :].fill_(EMPTY.value)
        memory.barrier()

    def result(self, memory: PeerMemory, offset: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """[tokens, H] of one of the results."""
        begin = offset // 4
        words = tokens * self.hidden * dtype.itemsize // 4
        return memory.buffer[begin : begin + words].view(dtype).view(tokens, self.hidden)
