"""Sends the chosen experts and gates of a rank's own rows to all ranks.

A token's choice, up to four experts and their gates, is a lane of eight columns: they are sent as one-shot
words (``one_shot.py``), with the same memory, slots and counters.

A rank without tokens in a row of words sends nothing, so its peers do not learn from the row that it has
ended earlier calls. They know it from the flags of the previous two-shot call (``two_shot.py``), which made
the rows that are routed here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from chorale.kernels.triton.launch import wait_for_previous
from chorale.kernels.triton.reduce.columns import clear_ranks8, code_of
from chorale.kernels.triton.reduce.one_shot import count_calls, send_to_peers
from chorale.kernels.triton.reduce.words import receive


@triton.jit
def _loaded(ptr, first, there, k: tl.constexpr, K: tl.constexpr):
    """Return number ``k`` of each token's choice; 0 from K on."""
    if k < K:
        found = tl.load(ptr + first + k, mask=there, other=0)
    else:
        found = (first * 0).to(ptr.dtype.element_ty)
    return found


@triton.jit
def _store_choices(ids_ptr, gates_ptr, first, there, words, K: tl.constexpr):
    """Store choices. A missing choice becomes expert 0, because other kernels use ids as indexes, with a NaN
    gate."""
    for k in tl.static_range(K):
        tl.store(ids_ptr + first + k, tl.maximum(words[0][k], 0).to(tl.int64), mask=there)
        tl.store(gates_ptr + first + k, words[1][k].to(tl.float32, bitcast=True), mask=there)


@triton.jit(do_not_specialize=["T", "R", "rank"])
def _choices_kernel(
    own_ids_ptr,  # [R, K] int64: ids of own rows
    own_gates_ptr,  # [R, K] float32
    ids_ptr,  # [T, K] int64
    gates_ptr,  # [T, K] float32
    peers_ptr,  # [N] int64: start address of each rank's memory
    calls_ptr,  # [rows, COUNTERS] int32
    status,  # address
    T,
    R,  # rows per owner
    rank,
    from_bytes,  # bytes per sender
    H: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    COUNTERS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) + tl.arange(0, 1)[:, None]
    lanes = tl.arange(0, LANES)[None, :]
    local = row * (H // 8) + lanes
    token = rank * R + local
    inside = (lanes < H // 8) & (local < R) & (token < T)
    here = tl.load(peers_ptr + rank)
    wait_for_previous(PDL)
    calls = tl.load(calls_ptr + row * COUNTERS)
    place = ((calls & 1) * N).to(tl.int64) * from_bytes + row.to(tl.int64) * (4 * H) + lanes * 32
    first = local.to(tl.int64) * K
    own: tl.tuple = ()
    for k in tl.static_range(4):
        ids = _loaded(own_ids_ptr, first, inside, k, K).to(tl.int32)
        own += (ids.to(tl.float32, bitcast=True),)
    for k in tl.static_range(4):
        own += (_loaded(own_gates_ptr, first, inside, k, K),)
    send_to_peers(peers_ptr, place + rank * from_bytes, inside, own, rank, N, True, ASM)
    to = token.to(tl.int64) * K
    for k in tl.static_range(K):
        tl.store(ids_ptr + to + k, own[k].to(tl.int32, bitcast=True).to(tl.int64), mask=inside)
        tl.store(gates_ptr + to + k, own[4 + k], mask=inside)
    for other in tl.static_range(N):
        theirs = other * R + local
        code = code_of(other, (lanes < H // 8) & (local < R) & (theirs < T), rank)
        at = here + place + tl.cast(other, tl.int64) * from_bytes
        words = receive((at, at + 16), (code, code), status, ASM)
        _store_choices(ids_ptr, gates_ptr, theirs.to(tl.int64) * K, code != 0, words, K)
    clear_ranks8(here + place, from_bytes, (lanes < H // 8) & (local < R), rank, N, True, ASM)
    tl.debug_barrier()  # all threads have read the counter
    count_calls(calls_ptr, row, calls, row >= 0, COUNTERS)
