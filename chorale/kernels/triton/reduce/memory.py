"""The layout of the memory that all ranks can write to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chorale.kernels.triton import tuning
from chorale.kernels.triton.reduce.words import EMPTY
from chorale.parallel.peer_memory import PeerMemory

ROW_WORDS = 32  # words per rank and row in an exchange of few numbers (``rows.py``)
EXCHANGED_ROWS = 1024  # maximum rows of such an exchange


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets of the kernels' data in a ``PeerMemory``. The same on all ranks."""

    size: int  # number of ranks
    hidden: int
    tokens: int  # maximum tokens per step
    few: int  # rows of the largest one-shot call
    dtype: torch.dtype  # the model's type, to which norms and parts are rounded

    @property
    def few_from(self) -> int:
        """Bytes per sender in one-shot calls, with rows at the distance of float32 rows."""
        return self.few * self.hidden * 4

    @property
    def rows(self) -> int:
        """Maximum rows per owner in two-shot calls."""
        return -(-self.tokens // self.size)

    @property
    def many_from(self) -> int:
        """Bytes per sender in two-shot calls."""
        return self.rows * self.hidden * self.dtype.itemsize

    @property
    def words(self) -> int:
        """Offset of the words of two-shot calls."""
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
        """Offset of the words of exchanges of few numbers per row."""
        return self.flags + self.size * tuning.REDUCE_FLAGS * 4

    @property
    def exchanged(self) -> int:
        """Maximum rows of an exchange of few numbers per row."""
        return min(self.tokens, EXCHANGED_ROWS)

    @property
    def num_bytes(self) -> int:
        return self.numbers + 2 * self.size * self.exchanged * ROW_WORDS * 4

    def prepare(self, memory: PeerMemory) -> None:
        """Set all words to EMPTY and all flags to zero. Must be called on all ranks."""
        memory.buffer[: self.normed // 4].fill_(EMPTY.value)
        memory.buffer[self.flags // 4 : self.numbers // 4].zero_()
        memory.buffer[self.numbers // 4 :].fill_(EMPTY.value)
        memory.barrier()

    def result(self, memory: PeerMemory, offset: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the result at ``offset`` as [tokens, H]."""
        begin = offset // 4
        words = tokens * self.hidden * dtype.itemsize // 4
        return memory.buffer[begin : begin + words].view(dtype).view(tokens, self.hidden)
