"""Exchange of few numbers per row, inside a kernel that has this rank's numbers and needs those of all ranks.

As in a one-shot all-reduce (``one_shot.py``), words are also the signal, and a row's counter of calls gives
its slot. All ranks skip a row that needs no exchange.

A program that waits for a row has sent that row, and the programs of lower rows have started before it. So
the lowest incomplete row always makes progress, however many programs a GPU runs at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from chorale.kernels.triton.reduce.columns import code_of, full4
from chorale.kernels.triton.reduce.memory import ROW_WORDS
from chorale.kernels.triton.reduce.words import EMPTY, load4, receive, store4

WORDS = tl.constexpr(ROW_WORDS)


@dataclass(frozen=True, slots=True)
class RowExchange:
    """The arguments of kernels that exchange rows. There is one for each ``SymmetricReducer``."""

    addresses: torch.Tensor  # [size] int64: start address of each rank's memory
    calls: torch.Tensor  # [rows] int32
    arrivals: torch.Tensor  # [rows] int32, zeros between kernels: finished programs of each row
    status: int  # address
    begin: int  # offset of the words in that memory, bytes
    rank: int
    size: int

    def covers(self, rows: int) -> bool:
        return rows <= self.calls.shape[0]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return ``peers_ptr``, ``calls_ptr``, ``status``, ``begin``, ``from_bytes`` and ``rank`` for a
        kernel."""
        from_bytes = self.calls.shape[0] * ROW_WORDS * 4
        return self.addresses, self.calls, self.status, self.begin, from_bytes, self.rank


@triton.jit
def swap_row(
    own_ptr,  # this rank's numbers of the row, written by this program
    all_ptr,  # rank 0's numbers of the row; this function writes all ranks' numbers
    rank_stride,  # numbers per rank
    row,
    peers_ptr,
    calls_ptr,
    status,
    begin,
    from_bytes,
    rank,
    USED: tl.constexpr,  # numbers of the row, at most WORDS
    LANES: tl.constexpr,  # threads per program; two threads with the same words would clear each other's
    N: tl.constexpr,
    ASM: tl.constexpr,
):
    """Send a row's numbers to all peers and wait for theirs. The programs of a rank must call it at most once
    per row and kernel; afterwards the numbers may be read."""
    tl.debug_barrier()
    lanes = tl.arange(0, LANES)[None, :]
    inside = lanes * 4 < USED
    here = tl.load(peers_ptr + rank)
    calls = tl.load(calls_ptr + row)
    own = load4(own_ptr.to(tl.int64) + lanes * 16, inside, ASM)
    place = begin + ((calls & 1) * N).to(tl.int64) * from_bytes + row.to(tl.int64) * (4 * WORDS) + lanes * 16
    for step in tl.static_range(1, N):
        to = tl.load(peers_ptr + (rank + step) % N) + place + rank * tl.cast(from_bytes, tl.int64)
        store4(to, inside, full4(own), True, ASM)
    empty = lanes * 0 + EMPTY
    for first in tl.static_range(0, N, 2):
        a = here + place + first * tl.cast(from_bytes, tl.int64)
        b = a + from_bytes
        a_code, b_code = code_of(first, inside, rank), code_of(first + 1, inside, rank)
        words = receive((a, b), (a_code, b_code), status, ASM)
        found = all_ptr.to(tl.int64) + first * tl.cast(rank_stride, tl.int64) * 4 + lanes * 16
        store4(found, a_code != 0, words[0], False, ASM)
        store4(found + tl.cast(rank_stride, tl.int64) * 4, b_code != 0, words[1], False, ASM)
        store4(a, a_code != 0, (empty, empty, empty, empty), False, ASM)
        store4(b, b_code != 0, (empty, empty, empty, empty), False, ASM)
    mine = all_ptr.to(tl.int64) + rank * tl.cast(rank_stride, tl.int64) * 4 + lanes * 16
    store4(mine, inside, own, False, ASM)
    tl.debug_barrier()
    tl.store(calls_ptr + row, calls + 1)
