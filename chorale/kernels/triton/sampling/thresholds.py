"""min_p, top_k and top_p as one threshold per row, found without sorting, on one rank or several.

Specified by ``kernels/reference/sampling/filters.py``. A threshold is the largest score that enough of the
row reaches. A round is one kernel over all rows: it measures how much of a row is at or above 15 pivots, and
the smallest and the largest score in the pivots' range. The row's last program to finish computes the next
pivots. If each of several ranks has the logits of some token ids, the ranks exchange these 18 numbers, 72
bytes per row, and compute the same pivots. No logits are gathered.

A row first searches for its kth score, then for the edge of its nucleus within what min_p and top_k keep, and
skips later rounds and their exchanges. The first pivots of a search divide the range of scores, which settles
most rows in four rounds; later pivots divide the range of ordered images of float32, of which there are 2^32
= 16^8, so that the last round settles every row. A search also ends when all remaining scores in its range
are equal.

A count is exact, so the kth score has the same bits as on one rank. A mass is summed over pieces that do not
depend on the batch, then over ranks in order: all ranks get the same bits, which differ from one rank's sum
by rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import SamplingInputs
from chorale.kernels.triton import tuning
from chorale.kernels.triton.launch import dependent, is_nvidia, wait_for_previous
from chorale.kernels.triton.reduce.memory import ROW_WORDS
from chorale.kernels.triton.reduce.rows import WORDS, RowExchange, swap_row
from chorale.kernels.triton.sampling.masks import COLUMNS, STRIDES, load_scores, masks_in_use, masks_of

BLOCK, BLOCKS, WARPS = 512, 4, 4  # shape of a piece
SLOTS = tl.constexpr(16)  # measures per round: the total, and the part that reaches each pivot
SENT = tl.constexpr(18)  # the slots, the smallest and the largest score in the range
VALUE_ROUNDS = tl.constexpr(4)  # first rounds of a search, whose pivots divide the range of values
ROUNDS = 2 * (VALUE_ROUNDS.value + 8)  # two searches
# A row's state, int64: pivots (the first is the start of the range), end of the range, search, rounds so far
STATE = tl.constexpr(24)
_END, _SEARCH, _ROUND = tl.constexpr(16), tl.constexpr(17), tl.constexpr(18)
_K, _P, _SETTLED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# A row's values, float32: its best score, the threshold that min_p and top_k give
VALUES = tl.constexpr(2)
_ARGUMENTS = ["rank", "rank_stride", "begin", "from_bytes", "pieces"]


@triton.jit
def key_of(value):
    """Convert float32 to int64 in the same order, without gaps."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def filtered(filters_ptr, row, V):
    k = tl.load(filters_ptr + row * 3)
    p = tl.load(filters_ptr + row * 3 + 1)
    m = tl.load(filters_ptr + row * 3 + 2)
    return (k < V) | (p < 1.0) | (m > 0.0)


@triton.jit
def _begin_search(state_ptr, low, high, search):
    tl.store(state_ptr + _SEARCH, search)
    tl.store(state_ptr + _ROUND, 0)
    _store_pivots(state_ptr, low, high, 0)


@triton.jit
def _store_pivots(state_ptr, low, high, number):
    """Store pivots that divide the range of ordered images from ``low`` to before ``high``."""
    tl.store(state_ptr, low)
    tl.store(state_ptr + _END, high)
    first, last, width = value_of(low), value_of(high - 1), high - low
    for n in tl.static_range(1, SLOTS):
        if number < VALUE_ROUNDS:
            # Exact or with one rounding, so that all ranks get the same bits. No overflow.
            key = key_of(tl.fma(last * 0.5 - first * 0.5, n / (SLOTS / 2), first))
        else:
            key = low + (width * n + (SLOTS - 1)) // SLOTS
        tl.store(state_ptr + n, tl.minimum(tl.maximum(key, low), high - 1))


@triton.jit
def _begin_nucleus(state_ptr, top, floor, p):
    # The best score has mass 1, and all scores lower by 20 (32) together less than 1 - p, in any vocabulary
    # of up to four million tokens.
    surely = top - tl.where(p > 0.99, 32.0, 20.0)
    _begin_search(state_ptr, key_of(tl.maximum(floor, surely)), key_of(top) + 1, _P)


@triton.jit
def _conclude(
    all_ptr, rank_stride, filters_ptr, state_ptr, values_ptr, edge_ptr, V,
    START: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute a row's next state from all ranks' numbers."""
    k, p = tl.load(filters_ptr), tl.load(filters_ptr + 1)
    least, most = float("inf"), -float("inf")
    for rank in tl.static_range(N):
        found = all_ptr + rank * rank_stride
        least = tl.minimum(least, tl.load(found + SLOTS, cache_modifier=".cg"))
        most = tl.maximum(most, tl.load(found + SLOTS + 1, cache_modifier=".cg"))
    if START:
        top = tl.maximum(most, -3.4028234663852886e38)  # finite even if nothing is allowed
        share, edge = tl.load(filters_ptr + 2), -float("inf")
        if share > 0.0:
            edge = top + tl.log(share)
        tl.store(edge_ptr, edge)
        tl.store(values_ptr, top)
        tl.store(values_ptr + 1, edge)
        if k < V:
            _begin_search(state_ptr, key_of(tl.minimum(least, top)), key_of(top) + 1, _K)
        elif p < 1.0:
            _begin_nucleus(state_ptr, top, edge, p)
        else:
            tl.store(state_ptr + _SEARCH, _SETTLED)
    else:
        slots = tl.arange(0, SLOTS)
        sums = tl.zeros((SLOTS,), tl.float32)
        for rank in tl.static_range(N):
            sums += tl.load(all_ptr + rank * rank_stride + slots, cache_modifier=".cg")
        pivots, low, high = tl.load(state_ptr + slots), tl.load(state_ptr), tl.load(state_ptr + _END)
        search, number = tl.load(state_ptr + _SEARCH), tl.load(state_ptr + _ROUND) + 1
        tl.debug_barrier()  # all threads have read the state
        goal = k
        if search == _P:
            goal = p * tl.sum(tl.where(slots == 0, sums, 0.0), 0)
        reached = (sums >= goal) | (pivots <= low)
        low = tl.max(tl.where(reached, pivots, low), 0)
        high = tl.min(tl.where(reached, high, pivots), 0)
        if least <= most:  # the range contains scores, so the threshold is one of them
            low, high = tl.maximum(low, key_of(least)), tl.minimum(high, key_of(most) + 1)
        if high - low <= 1:
            threshold = tl.maximum(tl.load(edge_ptr), value_of(low))
            tl.store(edge_ptr, threshold)
            if (search == _K) & (p < 1.0):
                tl.store(values_ptr + 1, threshold)
                _begin_nucleus(state_ptr, tl.load(values_ptr), threshold, p)
            else:
                tl.store(state_ptr + _SEARCH, _SETTLED)
        else:
            tl.store(state_ptr + _ROUND, number)
            _store_pivots(state_ptr, low, high, number)


@triton.jit
def _joined(v):
    """Join 16 tensors [B] to [B, 2, 2, 2, 2], so that one reduction replaces 16 sequential ones."""
    a = tl.join(
        tl.join(tl.join(v[0], v[8]), tl.join(v[4], v[12])),
        tl.join(tl.join(v[2], v[10]), tl.join(v[6], v[14])),
    )
    b = tl.join(
        tl.join(tl.join(v[1], v[9]), tl.join(v[5], v[13])),
        tl.join(tl.join(v[3], v[11]), tl.join(v[7], v[15])),
    )
    return tl.join(a, b)


@triton.jit
def _measure(
    logits_ptr, forbidden_ptr, index_ptr, octets_ptr, octets_stride, stops_ptr, stops_stride, stop_stride,
    row, temperature, state_ptr, values_ptr, parts_ptr, V, pieces,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, STOPS: tl.constexpr,
    START: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Write the numbers of this program's pieces of a row to ``parts_ptr`` [WORDS, pieces]."""
    pivots: tl.tuple = ()
    top, floor, first, last, search = 0.0, 0.0, -3.4028234663852886e38, float("inf"), 0
    if not START:
        top, floor = tl.load(values_ptr), tl.load(values_ptr + 1)
        first, last = value_of(tl.load(state_ptr)), value_of(tl.load(state_ptr + _END) - 1)
        search = tl.load(state_ptr + _SEARCH).to(tl.int32)
        for n in tl.static_range(1, SLOTS):
            pivots += (value_of(tl.load(state_ptr + n)),)
    slots, ends = tl.arange(0, SLOTS), tl.arange(0, 2)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        sums: tl.tuple = (tl.zeros((BLOCK,), tl.float32),)
        for _ in tl.static_range(1, SLOTS):
            sums += (sums[0],)
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        most = tl.full((BLOCK,), -float("inf"), tl.float32)
        for block in tl.static_range(BLOCKS):
            tokens = (piece * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
            scores = load_scores(
                logits_ptr, forbidden_ptr, index_ptr, octets_ptr, octets_stride,
                stops_ptr, stops_stride, stop_stride, row, tokens, V, temperature, MASKED, STOPS, FIRST,
            )  # fmt: skip
            between = (scores >= first) & (scores <= last)
            least = tl.minimum(least, tl.where(between, scores, float("inf")))
            most = tl.maximum(most, tl.where(between, scores, -float("inf")))
            if not START:
                mass = tl.where(scores >= floor, tl.exp(scores - top), 0.0)
                mass = tl.where(search == _K, 1.0, mass)
                new: tl.tuple = (sums[0] + mass,)
                for n in tl.static_range(1, SLOTS):
                    new += (sums[n] + tl.where(scores >= pivots[n - 1], mass, 0.0),)
                sums = new
        if not START:
            tl.store(parts_ptr + slots * pieces + piece, tl.sum(_joined(sums), 0).reshape(SLOTS))
        # The smallest is negated, so that one reduction finds both.
        found = tl.max(tl.join(-least, most), 0)
        tl.store(parts_ptr + (SLOTS + ends) * pieces + piece, tl.where(ends == 0, -found, found))


@triton.jit
def _add_pieces(parts_ptr, own_ptr, pieces, PIECES: tl.constexpr, START: tl.constexpr):
    words, places = tl.arange(0, WORDS), tl.arange(0, PIECES)
    written = words < SENT
    if START:
        written = written & (words >= SLOTS)  # the first round has no pivots
    parts = tl.load(
        parts_ptr + words[:, None] * pieces + places[None, :],
        mask=written[:, None] & (places < pieces)[None, :],
        other=0.0,
        cache_modifier=".cg",  # other programs wrote them
    )
    inside = (places < pieces)[None, :]
    least = tl.min(tl.where(inside, parts, float("inf")), 1)
    most = tl.max(tl.where(inside, parts, -float("inf")), 1)
    numbers = tl.where(words == SLOTS, least, tl.where(words == SLOTS + 1, most, tl.sum(parts, 1)))
    tl.store(own_ptr + words, numbers)


@triton.jit(do_not_specialize=[*_ARGUMENTS, *STRIDES], do_not_specialize_on_alignment=COLUMNS)
def _round_kernel(
    logits_ptr,  # [N, columns of this rank] float32
    stride,
    temperature_ptr,
    filters_ptr,  # [N, 3] float32: top_k, top_p, min_p
    forbidden_ptr,
    index_ptr,
    octets_ptr,
    octets_stride,
    stops_ptr,
    stops_stride,
    stop_stride,
    state_ptr,  # [N, STATE] int64
    values_ptr,  # [N, VALUES] float32
    edge_ptr,  # [N] float32: the threshold so far
    parts_ptr,  # [N, WORDS, pieces] float32
    arrivals_ptr,  # [N] int32: zeros between rounds
    own_ptr,  # [N, WORDS] float32
    all_ptr,  # [ranks, N, WORDS] float32; own_ptr with one rank
    rank_stride,
    peers_ptr,
    calls_ptr,
    status,
    begin,
    from_bytes,
    rank,
    columns,
    V,  # size of the whole vocabulary
    pieces,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
    STOPS: tl.constexpr,
    FIRST: tl.constexpr,  # the token id of column 0
    START: tl.constexpr,  # only find the range
    THREADS: tl.constexpr,
    N: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Run a round. The last of a row's programs to finish sums, exchanges and computes the next state."""
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    state_ptr += row * STATE
    values_ptr += row * VALUES
    temperature = tl.load(temperature_ptr + row)
    if START:
        active = filtered(filters_ptr, row, V) & (temperature > 0)
        if not active:
            tl.store(edge_ptr + row, -float("inf"))
            tl.store(state_ptr + _SEARCH, tl.cast(_SETTLED, tl.int64))
    else:
        active = tl.load(state_ptr + _SEARCH) != _SETTLED
    if active:
        parts_ptr += row * WORDS * pieces
        _measure(
            logits_ptr + row * stride, forbidden_ptr, index_ptr, octets_ptr, octets_stride,
            stops_ptr, stops_stride, stop_stride, row, temperature, state_ptr, values_ptr, parts_ptr,
            columns, pieces, BLOCK, BLOCKS, MASKED, STOPS, START, FIRST,
        )  # fmt: skip
        tl.debug_barrier()  # all threads must have written before the program counts as finished
        if tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            tl.store(arrivals_ptr + row, 0)
            own = own_ptr + row * WORDS
            _add_pieces(parts_ptr, own, pieces, PIECES, START)
            everyone = all_ptr + row * WORDS
            if N > 1:
                swap_row(
                    own, everyone, rank_stride, row, peers_ptr, calls_ptr, status, begin, from_bytes,
                    rank, SENT, THREADS, N, ASM,
                )  # fmt: skip
            else:
                tl.debug_barrier()  # all threads have written the row's numbers
            _conclude(
                everyone, rank_stride, filters_ptr + row * 3, state_ptr, values_ptr, edge_ptr + row,
                V, START, N,
            )  # fmt: skip


def thresholds(
    logits: torch.Tensor,
    draws: SamplingInputs,
    forbidden: torch.Tensor,
    first: int = 0,
    vocab: int | None = None,
    exchange: RowExchange | None = None,
) -> torch.Tensor:
    """Return thresholds [N] float32 of the scores; -inf for rows without a filter and for greedy rows.

    logits [N, V] float32, ``forbidden`` as in ``Ops.sample``; ``draws`` has filters. With ``exchange``, each
    rank has the logits of the ids from ``first``, out of ``vocab`` ids; ``forbidden`` and ``draws.allowed``
    cover its ids, and all ranks get the same bits.
    """
    count, columns = logits.shape
    assert draws.filters is not None
    temperature, filters = draws.temperature, draws.filters.contiguous()
    pieces, device = triton.cdiv(columns, BLOCK * BLOCKS), logits.device

    def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    state, values, edge = room(count, STATE.value, dtype=torch.int64), room(count, VALUES.value), room(count)
    parts, own, stride = room(count, ROW_WORDS, pieces), room(count, ROW_WORDS), count * ROW_WORDS
    if exchange is None:
        ranks, everyone = 1, own
        arrivals = torch.zeros(count, dtype=torch.int32, device=device)
        swap: tuple[Any, ...] = (everyone, arrivals, 0, 0, 0, 0)
    else:
        ranks, everyone = exchange.size, room(exchange.size, count, ROW_WORDS)
        arrivals, swap = exchange.arrivals, exchange.arguments
    programs = min(pieces, triton.cdiv(tuning.ROUND_PROGRAMS, count))
    for number in range(1 + ROUNDS):
        _round_kernel[(programs, count)](
            logits, logits.stride(0), temperature, filters, forbidden, *masks_of(draws, forbidden),
            state, values, edge, parts, arrivals, own, everyone, stride, *swap, columns, vocab or columns,
            pieces, PIECES=triton.next_power_of_2(pieces), BLOCK=BLOCK, BLOCKS=BLOCKS, **masks_in_use(draws),
            FIRST=first, START=number == 0, THREADS=32 * WARPS, N=ranks, ASM=is_nvidia(device),
            num_warps=WARPS, **dependent(logits),
        )  # fmt: skip
    return edge
