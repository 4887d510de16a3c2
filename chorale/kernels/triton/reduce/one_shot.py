"""One-shot all-reduce, for few rows: a rank sends its part of each row to all peers, and every rank sums.

A row's words go to index (slot, sender, row) of each peer's memory and are also the signal (``words.py``).
The slot is the parity of the number of earlier calls with these columns of the row, which is counted on the
device, so that a captured graph needs no data from the host. Two slots are enough without a second signal: a
rank that sends its words of call n + 2 has received all words of call n + 1, which peers sent after their
kernel of call n had ended, so they have read and cleared the slot.

A program sends before it waits, and waits only for programs with the same number on other ranks: programs
need not all be resident at once, as long as they start in order.

If no norm follows, a row is divided among programs: a single program would take 4 us to read a token's 20
expert parts. Each program counts its calls; a program with a whole row counts for all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chorale.kernels.triton.launch import wait_for_previous
from chorale.kernels.triton.reduce.columns import (
    add8,
    clear_ranks8,
    load8,
    normed8,
    own_part8,
    part8,
    rounded8,
    send8,
    store8,
    sum_of_ranks8,
)


@triton.jit
def send_to_peers(
    peers_ptr, place, inside, values, rank, N: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr
):
    """Send to all peers, beginning with the next rank, so that not all ranks send to the same rank at a
    time."""
    for step in tl.static_range(1, N):
        to = tl.load(peers_ptr + (rank + step) % N)
        send8(to + place, inside, values, WIDE, ASM)


@triton.jit
def count_calls(calls_ptr, rows, calls, there, COUNTERS: tl.constexpr):
    """Count one more call of whole rows."""
    counters = tl.arange(0, COUNTERS)[None, :]
    tl.store(calls_ptr + rows * COUNTERS + counters, calls + 1 + counters * 0, mask=there & (counters >= 0))


@triton.jit(
    do_not_specialize=[
        "T", "rank", "split_stride", "row_stride", "first_expert", "num_experts",
    ]
)  # fmt: skip
def _rows_kernel(
    y_ptr,  # [SPLITS, rows, H]: this rank's part
    pair_ids_ptr,  # None; or [T, K] int64, if y has the parts of only some of these pairs (``own_part8``)
    first_expert,
    num_experts,
    b_ptr,  # [H], added to this rank's part (if HAS_BIAS)
    x_ptr,  # [T, H] float32
    sum_ptr,  # [T, H] float32: the sum of x and all ranks' parts; may be x
    norm_ptr,  # [H] float32 (if NORM)
    normed_ptr,  # [T, H] (if NORM)
    peers_ptr,  # [N] int64: start address of each rank's memory
    calls_ptr,  # [rows, COUNTERS] int32
    status,  # address
    T,
    rank,
    split_stride,
    row_stride,
    from_bytes,  # bytes per sender
    eps,
    K: tl.constexpr,  # pairs per row (if pair_ids_ptr)
    H: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,  # words are float32
    BLOCKS: tl.constexpr,  # programs per row; more than one only without NORM
    LANES: tl.constexpr,  # lanes per program
    COUNTERS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    rows = pid // BLOCKS + tl.arange(0, 1)[:, None]
    block = pid % BLOCKS
    lanes = block * LANES + tl.arange(0, LANES)[None, :]
    inside = (rows < T) & (lanes < H // 8)
    here = tl.load(peers_ptr + rank)
    if NORM:
        norm = load8(norm_ptr.to(tl.int64) + (rows * 0 + lanes) * 32, lanes + rows * 0 < H // 8, True, ASM)
    wait_for_previous(PDL)
    calls = tl.load(calls_ptr + rows * COUNTERS + block, mask=rows < T, other=0)
    if pair_ids_ptr is None:
        part = part8(y_ptr, b_ptr, rows, lanes, inside, split_stride, row_stride, SPLITS, HAS_BIAS, ASM)
    else:
        part = own_part8(
            y_ptr, pair_ids_ptr, rows, rows < T, lanes, inside, first_expert, num_experts, split_stride,
            row_stride, K, SPLITS, ASM,
        )  # fmt: skip
    slot = ((calls & 1) * N).to(tl.int64) * from_bytes
    place = slot + rows.to(tl.int64) * (4 * H) + lanes * (32 if WIDE else 16)
    send_to_peers(peers_ptr, place + rank * from_bytes, inside, part, rank, N, WIDE, ASM)
    bytes_of_row = rows.to(tl.int64) * (4 * H) + lanes * 32
    x = load8(x_ptr.to(tl.int64) + bytes_of_row, inside, True, ASM)
    own = rounded8(part, WIDE, ASM)
    total = sum_of_ranks8(own, here + place, from_bytes, inside, rank, status, N, WIDE, ASM)
    x = add8(x, total)
    store8(sum_ptr.to(tl.int64) + bytes_of_row, inside, x, True, ASM)
    if NORM:
        wide: tl.constexpr = normed_ptr.dtype.element_ty == tl.float32
        normed_at = normed_ptr.to(tl.int64) + (rows.to(tl.int64) * (H // 8) + lanes) * (32 if wide else 16)
        store8(normed_at, inside, normed8(x, norm, eps, H), wide, ASM)
    clear_ranks8(here + place, from_bytes, inside, rank, N, WIDE, ASM)
    tl.debug_barrier()  # all threads have read the counters
    if BLOCKS == 1:
        count_calls(calls_ptr, rows, calls, rows < T, COUNTERS)
    else:
        tl.store(calls_ptr + rows * COUNTERS + block, calls + 1, mask=rows < T)
