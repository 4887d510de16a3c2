"""One-shot all-reduce, for few rows: a rank sends its part of each row to all peers, and every rank sums.

A row's words go to place (slot, sender, row) of each peer's memory and are their own signal (``words.py``).
The slot is the parity of the number of calls that had these columns of the row, which is counted on the
device, so that a captured graph needs nothing from the host. Two slots are enough without a second signal: a
rank that sends its words of call n + 2 has received all of call n + 1, which peers sent when their kernel of
call n had ended, so they have read and cleared the slot.

A program sends before it waits, and waits only for programs of its number on other ranks: they need not all
be resident at once, as long as programs start in order.

Where no norm follows, a row is divided among programs: one of them would take 4 us to read a token's 20
expert parts. Each counts its own calls; a program that has a whole row counts for all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chorale.kernels.triton.launch import wait_for_previous
from chorale.kernels.triton.moe.router import choose
from chorale.kernels.triton.reduce.columns import (
    add8,
    clear_ranks8,
    dot_lanes8,
    load8,
    multiply8,
    normed8,
    own_part8,
    part8,
    rounded8,
    scaled8,
    send8,
    store8,
    sum_of_ranks8,
)
from chorale.kernels.triton.reduce.words import post, prefetch, take_posted


@triton.jit
def send_to_peers(
    peers_ptr, place, inside, values, rank, N: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr
):
    """The next rank first, so that not all ranks send to one at a time."""
    for step in tl.static_range(1, N):
        to = tl.load(peers_ptr + (rank + step) % N)
        send8(to + place, inside, values, WIDE, ASM)


@triton.jit
def count_calls(calls_ptr, rows, calls, there, COUNTERS: tl.constexpr):
    """One call more of whole rows [ROWS, 1]."""
    counters = tl.arange(0, COUNTERS)[None, :]
    tl.store(calls_ptr + rows * COUNTERS + counters, calls + 1 + counters * 0, mask=there & (counters >= 0))


@triton.jit(
    do_not_specialize=[
        "T", "rank", "split_stride", "row_stride", "row_programs", "first_expert", "num_experts",
    ]
)  # fmt: skip
def _rows_kernel(
    y_ptr,  # this rank's part: SPLITS times rows of H
    pair_ids_ptr,  # None; or [T, K] int64: y has the parts of some of these pairs (``own_part8``)
    first_expert,
    num_experts,
    b_ptr,  # [H], added to this rank's part (if HAS_BIAS)
    x_ptr,  # [T, H] float32
    sum_ptr,  # [T, H] float32: x and all ranks' parts. May be x
    norm_ptr,  # [H] float32 (if NORM)
    normed_ptr,  # [T, H] (if NORM)
    peers_ptr,  # [N] int64: where each rank's memory begins
    calls_ptr,  # [rows, COUNTERS] int32
    status,  # address
    next_address,  # what later kernels will read (if PREFETCH)
    next_bytes,
    T,
    rank,
    split_stride,
    row_stride,
    row_programs,
    from_bytes,  # of a sender's words
    eps,
    K: tl.constexpr,  # pairs of a row (if pair_ids_ptr)
    H: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,  # words are float32
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,  # programs of a row: more than one only without NORM
    LANES: tl.constexpr,  # of a program
    COUNTERS: tl.constexpr,
    PREFETCH: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    rows = pid // BLOCKS * ROWS + tl.arange(0, ROWS)[:, None]
    block = pid % BLOCKS
    lanes = block * LANES + tl.arange(0, LANES)[None, :]
    inside = (rows < T) & (lanes < H // 8)
    here = tl.load(peers_ptr + rank)
    if NORM:
        norm = load8(norm_ptr.to(tl.int64) + (rows * 0 + lanes) * 32, lanes + rows * 0 < H // 8, True, ASM)
    wait_for_previous(PDL)
    if PREFETCH and pid >= row_programs:
        each = tl.cdiv(next_bytes // 16, tl.num_programs(0) - row_programs) * 16
        begin = (pid - row_programs).to(tl.int64) * each
        end = tl.minimum(begin + each, next_bytes)
        for ahead in range(begin, end, 16384):
            prefetch(next_address + ahead, tl.minimum(end - ahead, 16384).to(tl.int32), ASM)
    else:
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
            normed_at = normed_ptr.to(tl.int64) + (rows.to(tl.int64) * (H // 8) + lanes) * (
                32 if wide else 16
            )
            store8(normed_at, inside, normed8(x, norm, eps, H), wide, ASM)
        clear_ranks8(here + place, from_bytes, inside, rank, N, WIDE, ASM)
        tl.debug_barrier()  # all threads have read the counters
        if BLOCKS == 1:
            count_calls(calls_ptr, rows, calls, rows < T, COUNTERS)
        else:
            tl.store(calls_ptr + rows * COUNTERS + block, calls + 1, mask=rows < T)


@triton.jit
def _add5(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _weights(w_ptr, expert, lanes, E: tl.constexpr, H: tl.constexpr, ASM: tl.constexpr):
    there = lanes + tl.where(expert < E, 0, H) < H // 8
    return load8(w_ptr.to(tl.int64) + expert.to(tl.int64) * (4 * H) + lanes * 32, there, True, ASM)


@triton.jit
def _products4(w_ptr, first, x, normed, lanes, E: tl.constexpr, H: tl.constexpr, ASM: tl.constexpr):
    """(sum of the squares of row x, its norm's products with four experts [4]), in one reduction."""
    sums = tl.reduce(
        (
            dot_lanes8(x, x),
            dot_lanes8(_weights(w_ptr, first, lanes, E, H, ASM), normed),
            dot_lanes8(_weights(w_ptr, first + 1, lanes, E, H, ASM), normed),
            dot_lanes8(_weights(w_ptr, first + 2, lanes, E, H, ASM), normed),
            dot_lanes8(_weights(w_ptr, first + 3, lanes, E, H, ASM), normed),
        ),
        1,
        _add5,
    )
    each = tl.arange(0, 4)
    left = tl.where(each == 0, sums[1], sums[2])
    return sums[0], tl.where(each < 2, left, tl.where(each == 2, sums[3], sums[4]))


@triton.jit(do_not_specialize=["T", "rank", "split_stride", "row_stride"])
def _route_kernel(
    y_ptr,
    b_ptr,
    x_ptr,
    sum_ptr,  # [T, H] float32. Not x: other programs still read it
    norm_ptr,
    normed_ptr,
    w_ptr,  # [E, H] float32
    router_b_ptr,  # [E] float32
    logits_ptr,  # [T, E] float32, EMPTY between calls
    ids_ptr,  # [T, K] int64
    gates_ptr,  # [T, K] float32
    peers_ptr,
    calls_ptr,
    status,
    T,
    rank,
    split_stride,
    row_stride,
    from_bytes,
    eps,
    H: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,  # experts of one program: 1 or 4
    LANES: tl.constexpr,
    COUNTERS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """``_rows_kernel`` and the router: a program has one token and EACH experts; all of a token's programs
    receive and sum its row, the first sends and writes it, the last waits for all logits, chooses and
    clears. There is no fence, which would wait for the peers' memory."""
    token = tl.program_id(1)
    rows = token + tl.arange(0, 1)[:, None]
    lanes = tl.arange(0, LANES)[None, :]
    inside = lanes + rows * 0 < H // 8
    here = tl.load(peers_ptr + rank)
    norm = load8(norm_ptr.to(tl.int64) + lanes * 32, inside, True, ASM)
    first = tl.program_id(0) * EACH
    if EACH == 1:  # nothing waits for them before the row has arrived
        weights = _weights(w_ptr, first, lanes, E, H, ASM)
    experts = first + tl.arange(0, EACH)
    bias = tl.load(router_b_ptr + experts, mask=experts < E, other=0.0)
    wait_for_previous(PDL)
    calls = tl.load(calls_ptr + token * COUNTERS)
    part = part8(y_ptr, b_ptr, rows, lanes, inside, split_stride, row_stride, SPLITS, HAS_BIAS, ASM)
    slot = ((calls & 1) * N).to(tl.int64) * from_bytes
    place = slot + rows.to(tl.int64) * (4 * H) + lanes * (32 if WIDE else 16)
    if tl.program_id(0) == 0:
        send_to_peers(peers_ptr, place + rank * from_bytes, inside, part, rank, N, WIDE, ASM)
    bytes_of_row = rows.to(tl.int64) * (4 * H) + lanes * 32
    x = load8(x_ptr.to(tl.int64) + bytes_of_row, inside, True, ASM)
    own = rounded8(part, WIDE, ASM)
    x = add8(x, sum_of_ranks8(own, here + place, from_bytes, inside, rank, status, N, WIDE, ASM))
    weighted = multiply8(x, norm)
    if EACH == 1:
        squares, products = tl.sum(dot_lanes8(x, x), 1), tl.sum(dot_lanes8(weights, weighted), 1)
    else:
        squares, products = _products4(w_ptr, first, x, weighted, lanes, E, H, ASM)
    scale = 1.0 / tl.sqrt(squares / H + eps)
    logits = logits_ptr + token * E
    post(logits + experts, experts < E, products * scale + bias)
    if tl.program_id(0) == 0:
        store8(sum_ptr.to(tl.int64) + bytes_of_row, inside, x, True, ASM)
        wide: tl.constexpr = normed_ptr.dtype.element_ty == tl.float32
        normed_at = normed_ptr.to(tl.int64) + (rows.to(tl.int64) * (H // 8) + lanes) * (32 if wide else 16)
        store8(normed_at, inside, scaled8(x, scale, norm), wide, ASM)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        every = tl.arange(0, EXPERTS)
        found = take_posted(logits + every, every < E, ASM)
        found = tl.where(every < E, found, -float("inf"))
        choose(found, token.to(tl.int64), ids_ptr, gates_ptr, E, K, EXPERTS)
        clear_ranks8(here + place, from_bytes, inside, rank, N, WIDE, ASM)
        count_calls(calls_ptr, rows, calls, rows >= 0, COUNTERS)
