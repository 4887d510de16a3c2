"""Two-shot all-reduce with scattered norm, for many rows: a rank sums and norms its rows for all.

Rank r owns rows r * R .. r * R + R - 1. Every rank sends its part of a row to the owner; the words are also
the signal (``words.py``). The owner adds the residual, which only it keeps, norms, and writes the norm into
all ranks' results. A flag per program and rank, numbered by a counter on the device, signals their arrival.

A rank that has left a call has seen all peers' flags, which they set after reading and clearing their words:
one slot is enough. An owner writes a row's result only after it has received that row from all ranks, so all
have begun this call, and the readers of the previous call's results have ended.

Programs with the same number handle the same rows of each owner, so a program waits only for programs with
its number.
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
    part8,
    rounded8,
    send8,
    store8,
    sub8,
    sum_of_ranks8,
)
from chorale.kernels.triton.reduce.words import publish, wait_for_flags


@triton.jit(do_not_specialize=["T", "R", "rank", "split_stride", "row_stride"])
def _scattered_kernel(
    y_ptr,  # [SPLITS, rows, H]: this rank's part
    b_ptr,  # [H], added to this rank's part (if HAS_BIAS)
    x_ptr,  # [T, H] float32: own rows are read and written
    norm_ptr,  # [H] float32 (if NORM)
    low_ptr,  # [R, H]: the rounding error of the norm of own rows (if LOW)
    peers_ptr,  # [N] int64: start address of each rank's memory
    calls_ptr,  # [programs] int32
    status,  # address
    T,
    R,  # rows per owner
    rank,
    split_stride,
    row_stride,
    words,  # offsets in that memory, bytes: the words sent by peers,
    from_bytes,  # bytes per sender
    normed_at,  # the norm [T, H] of all rows (if NORM),
    whole_at,  # the sums [T, H] float32 of all rows (if WHOLE),
    flags,  # [N, tuning.REDUCE_FLAGS] int32
    eps,
    H: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    NORM_WIDE: tl.constexpr,  # the norm is float32
    LOW: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,  # words are float32
    LANES: tl.constexpr,
    FLAGS: tl.constexpr,  # flags per rank
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    pid, step = tl.program_id(0), tl.num_programs(0)
    some = tl.arange(0, 1)[:, None]
    lanes = tl.arange(0, LANES)[None, :]
    there = lanes + some * 0 < H // 8
    here = tl.load(peers_ptr + rank)
    lane_bytes: tl.constexpr = 32 if WIDE else 16
    row_bytes: tl.constexpr = H * 4 if WIDE else H * 2
    normed_lane: tl.constexpr = 32 if NORM_WIDE else 16
    if NORM:
        norm = load8(norm_ptr.to(tl.int64) + lanes * 32 + some * 0, there, True, ASM)
    wait_for_previous(PDL)
    calls = tl.load(calls_ptr + pid)

    # Begins with the next rank, so that not all ranks send to the same rank.
    for shift in tl.static_range(1, N):
        owner = (rank + shift) % N
        to = tl.load(peers_ptr + owner) + words + rank * from_bytes
        for begin in range(pid, R, step):
            local = begin + some
            rows = owner * R + local
            inside = there & (local < R) & (rows < T)
            part = part8(y_ptr, b_ptr, rows, lanes, inside, split_stride, row_stride, SPLITS, HAS_BIAS, ASM)
            send8(to + local.to(tl.int64) * row_bytes + lanes * lane_bytes, inside, part, WIDE, ASM)

    for begin in range(pid, R, step):
        local = begin + some
        rows = rank * R + local
        inside = there & (local < R) & (rows < T)
        part = part8(y_ptr, b_ptr, rows, lanes, inside, split_stride, row_stride, SPLITS, HAS_BIAS, ASM)
        row = rows.to(tl.int64)
        x_at = row * (4 * H) + lanes * 32
        x = load8(x_ptr.to(tl.int64) + x_at, inside, True, ASM)
        received = here + words + local.to(tl.int64) * row_bytes + lanes * lane_bytes
        own = rounded8(part, WIDE, ASM)
        x = add8(x, sum_of_ranks8(own, received, from_bytes, inside, rank, status, N, WIDE, ASM))
        store8(x_ptr.to(tl.int64) + x_at, inside, x, True, ASM)
        if NORM:
            normed = normed8(x, norm, eps, H)
            if LOW:
                low = sub8(normed, rounded8(normed, NORM_WIDE, ASM))
                low_at = (local.to(tl.int64) * (H // 8) + lanes) * normed_lane
                store8(low_ptr.to(tl.int64) + low_at, inside, low, NORM_WIDE, ASM)
        place = (row * (H // 8) + lanes) * normed_lane
        for shift in tl.static_range(N):
            to = tl.load(peers_ptr + (rank + shift) % N)
            if NORM:
                store8(to + normed_at + place, inside, normed, NORM_WIDE, ASM)
            if WHOLE:
                store8(to + whole_at + x_at, inside, x, True, ASM)
        clear_ranks8(received, from_bytes, inside, rank, N, WIDE, ASM)

    publish(peers_ptr, flags + (rank * FLAGS + pid) * 4, calls + 1, rank, N, ASM)
    wait_for_flags(here + flags + pid * 4, FLAGS * 4, calls + 1, rank, status, N, ASM)
    tl.store(calls_ptr + pid, calls + 1)
