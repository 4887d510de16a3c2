"""top_k, top_p and min_p as one threshold a row, found without sorting.

Specified by ``kernels/reference/sampling/filters.py``.

A threshold is the largest score that enough of the row reaches. The search runs over the 2^32 ordered images
of float32: each pass measures how much reaches seven pivots and so divides the range by eight. A pass is one
kernel over all rows. Its pieces do not depend on the batch, so that sums round alike; the next pass adds them
up before it starts. Rows without a filter return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.engine.types import EARLY_STOPS
from chorale.kernels.ops import SamplingInputs

BLOCK = 1024
BLOCKS = 4  # of a piece
_PASSES = 11  # 8 ** 11 >= 2 ** 32
_SLOTS = 8  # seven pivots, and everything
_COLUMNS = [
    "temperature_ptr",
    "filters_ptr",
    "index_ptr",
    "stops_ptr",
]  # may begin anywhere in a step's numbers
_STRIDES = ["stops_stride", "stop_stride"]
_LOWEST_KEY = tl.constexpr(-2139095040)  # of the lowest finite float32


@triton.jit
def key_of(value):
    """float32 -> int64 in the same order, without gaps."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_out(
    forbidden_ptr, index_ptr, octets_ptr, octets_stride, stops_ptr, stops_stride, stop_stride,
    row, tokens, V, MASKED: tl.constexpr, STOPS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Which of some tokens a row cannot have: those forbidden to all rows, by the row's grammar, or before
    its ``min_tokens``. FIRST: the token id of column 0."""
    inside = tokens < V
    out = tl.load(forbidden_ptr + tokens, mask=inside, other=1) != 0
    if MASKED:
        index = tl.load(index_ptr + row).to(tl.int64)
        places = octets_ptr + tl.maximum(index, 0) * octets_stride + tokens // 8
        octets = tl.load(places, mask=inside, other=0).to(tl.int32)
        out |= (((octets >> (tokens % 8)) & 1) == 0) & (index >= 0)
    if STOPS > 0:
        stops_ptr += row * stops_stride
        if tl.load(stops_ptr) >= 0:
            for n in tl.static_range(STOPS):
                out |= tokens + FIRST == tl.load(stops_ptr + n * stop_stride)
    return out


@triton.jit
def load_scores(
    logits_ptr, forbidden_ptr, index_ptr, octets_ptr, octets_stride, stops_ptr, stops_stride, stop_stride,
    row, tokens, V, temperature, MASKED: tl.constexpr, STOPS: tl.constexpr, FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Logits over temperature of some tokens of a row; -inf for tokens that are out, NaN or past the end."""
    raw = tl.load(logits_ptr + tokens, mask=tokens < V, other=-float("inf"))
    out = is_out(
        forbidden_ptr, index_ptr, octets_ptr, octets_stride, stops_ptr, stops_stride, stop_stride,
        row, tokens, V, MASKED, STOPS, FIRST,
    )  # fmt: skip
    scores = raw / temperature
    return tl.where((scores == scores) & ~out, scores, -float("inf"))


@triton.jit
def _uses(filters_ptr, row, V, K: tl.constexpr):
    """True if a row searches for its kth score (K), or for the edge of its nucleus."""
    k = tl.load(filters_ptr + row * 3)
    p = tl.load(filters_ptr + row * 3 + 1)
    return k < V if K else p < 1.0


@triton.jit
def filtered(filters_ptr, row, V):
    k = tl.load(filters_ptr + row * 3)
    p = tl.load(filters_ptr + row * 3 + 1)
    m = tl.load(filters_ptr + row * 3 + 2)
    return (k < V) | (p < 1.0) | (m > 0.0)


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_COLUMNS)
def _best_kernel(
    logits_ptr,
    stride,
    temperature_ptr,
    filters_ptr,  # [N, 3] float32: top_k, top_p, min_p
    forbidden_ptr,
    index_ptr,  # [N] int32 (if MASKED)
    octets_ptr,  # [G, octets_stride] uint8
    octets_stride,
    stops_ptr,  # [N, STOPS] int32 (if STOPS)
    stops_stride,
    stop_stride,
    best_ptr,  # [N, pieces]
    V,
    pieces,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
    STOPS: tl.constexpr,
):
    row, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    if filtered(filters_ptr, row, V) & (temperature > 0):
        best = tl.full((BLOCK,), -float("inf"), tl.float32)
        for block in range(BLOCKS):
            tokens = (piece * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
            scores = load_scores(
                logits_ptr + row * stride, forbidden_ptr, index_ptr, octets_ptr, octets_stride,
                stops_ptr, stops_stride, stop_stride, row, tokens, V, temperature, MASKED, STOPS,
            )  # fmt: skip
            best = tl.maximum(best, scores)
        tl.store(best_ptr + row * pieces + piece, tl.max(best, 0))


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _prepare_kernel(
    best_ptr,
    temperature_ptr,
    filters_ptr,
    top_ptr,  # [N] the row's best score
    edge_ptr,  # [N] the threshold so far
    V,
    pieces,
    PIECES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    edge = -float("inf")
    if filtered(filters_ptr, row, V) & (tl.load(temperature_ptr + row) > 0):
        places = tl.arange(0, PIECES)
        best = tl.load(best_ptr + row * pieces + places, mask=places < pieces, other=-float("inf"))
        top = tl.maximum(tl.max(best, 0), -3.4028234663852886e38)  # finite, though nothing may be allowed
        tl.store(top_ptr + row, top)
        share = tl.load(filters_ptr + row * 3 + 2)
        if share > 0.0:
            edge = top + tl.log(share)
    tl.store(edge_ptr + row, edge)


@triton.jit
def _range_of(bounds_ptr, sums_ptr, goal, top, row, pieces, number, K: tl.constexpr, PIECES: tl.constexpr):
    """(low, width) for pass ``number``: the part of the row's range that the previous pass left."""
    if number == 0:
        low = tl.cast(_LOWEST_KEY, tl.int64)
        width = key_of(top) + 1 - low
    else:
        low = tl.load(bounds_ptr + row * 2)
        width = tl.load(bounds_ptr + row * 2 + 1)
        places, slots = tl.arange(0, PIECES), tl.arange(0, 8)
        parts = tl.load(
            sums_ptr + (row * pieces + places[:, None]) * 8 + slots[None, :],
            mask=(places < pieces)[:, None],
            other=0.0,
        )
        sums = tl.sum(parts, 0)
        if not K:
            goal = goal * tl.sum(tl.where(slots == 7, sums, 0.0), 0)
        reached = tl.sum(((sums >= goal) & (slots < 7)).to(tl.int64), 0)
        above = (width * (reached + 1) + 7) // 8
        begin = (width * reached + 7) // 8
        low += begin
        width = above - begin
    return low, width


@triton.jit(do_not_specialize=["number", *_STRIDES], do_not_specialize_on_alignment=_COLUMNS)
def _pass_kernel(
    logits_ptr,
    stride,
    temperature_ptr,
    filters_ptr,
    forbidden_ptr,
    index_ptr,
    octets_ptr,
    octets_stride,
    stops_ptr,
    stops_stride,
    stop_stride,
    top_ptr,
    floor_ptr,  # [N]: of a nucleus, what top_k left
    old_bounds_ptr,  # [N, 2] int64: low, width of the pass before
    bounds_ptr,
    old_sums_ptr,  # [N, pieces, 8] float32
    sums_ptr,
    V,
    pieces,
    number,
    K: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
    STOPS: tl.constexpr,
):
    row, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    if _uses(filters_ptr, row, V, K) & (temperature > 0):
        top = tl.load(top_ptr + row)
        goal = tl.load(filters_ptr + row * 3 + (0 if K else 1))
        low, width = _range_of(old_bounds_ptr, old_sums_ptr, goal, top, row, pieces, number, K, PIECES)
        tl.store(bounds_ptr + row * 2, low)
        tl.store(bounds_ptr + row * 2 + 1, width)
        floor = tl.load(floor_ptr + row)
        pivots: tl.tuple = ()
        sums: tl.tuple = (tl.zeros((BLOCK,), tl.float32),)  # of the pivots, then of everything
        for n in tl.static_range(7):
            pivots += (value_of(low + (width * (n + 1) + 7) // 8),)
            sums += (sums[0],)
        for block in range(BLOCKS):
            tokens = (piece * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
            scores = load_scores(
                logits_ptr + row * stride, forbidden_ptr, index_ptr, octets_ptr, octets_stride,
                stops_ptr, stops_stride, stop_stride, row, tokens, V, temperature, MASKED, STOPS,
            )  # fmt: skip
            if K:
                mass = tl.full((BLOCK,), 1.0, tl.float32)
            else:
                mass = tl.where(scores >= floor, tl.exp(scores - top), 0.0)
            new: tl.tuple = ()
            for n in tl.static_range(7):
                new += (sums[n] + tl.where(scores >= pivots[n], mass, 0.0),)
            sums = new + (sums[7] + mass,)  # noqa: RUF005  (Triton has no stars)
        for n in tl.static_range(8):
            tl.store(sums_ptr + (row * pieces + piece) * 8 + n, tl.sum(sums[n], 0))


@triton.jit(do_not_specialize=["number", *_STRIDES], do_not_specialize_on_alignment=_COLUMNS)
def _settle_kernel(
    temperature_ptr,
    filters_ptr,
    top_ptr,
    floor_ptr,  # written after the kth scores: only they limit a nucleus
    edge_ptr,
    old_bounds_ptr,
    old_sums_ptr,
    V,
    pieces,
    number,
    K: tl.constexpr,
    PIECES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    found = -float("inf")
    if _uses(filters_ptr, row, V, K) & (tl.load(temperature_ptr + row) > 0):
        goal = tl.load(filters_ptr + row * 3 + (0 if K else 1))
        top = tl.load(top_ptr + row)
        low, _ = _range_of(old_bounds_ptr, old_sums_ptr, goal, top, row, pieces, number, K, PIECES)
        found = value_of(low)
        tl.store(edge_ptr + row, tl.maximum(tl.load(edge_ptr + row), found))
    if K:
        tl.store(floor_ptr + row, found)


def thresholds(logits: torch.Tensor, draws: SamplingInputs, forbidden: torch.Tensor) -> torch.Tensor:
    """[N] float32: scores below are out; -inf for rows without a filter and for greedy ones.

    logits [N, V] float32, ``forbidden`` as in ``Ops.sample``; ``draws`` has filters.
    """
    count, vocab = logits.shape
    assert draws.filters is not None
    temperature, columns = draws.temperature, draws.filters.contiguous()
    pieces = triton.cdiv(vocab, BLOCK * BLOCKS)
    sizes = {"PIECES": triton.next_power_of_2(pieces)}
    cut = {"BLOCK": BLOCK, "BLOCKS": BLOCKS, **masks_in_use(draws)}

    def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    best, top, floor, edge = room(count, pieces), room(count), room(count), room(count)
    sums = [room(count, pieces, _SLOTS) for _ in range(2)]
    bounds = [room(count, 2, dtype=torch.int64) for _ in range(2)]
    source = (logits, logits.stride(0), temperature, columns, forbidden, *masks_of(draws, forbidden))
    _best_kernel[(pieces, count)](*source, best, vocab, pieces, **cut, num_warps=4)
    _prepare_kernel[(count,)](best, temperature, columns, top, edge, vocab, pieces, **sizes, num_warps=1)
    for is_k in (True, False):
        for number in range(_PASSES):
            old, new = (number + 1) % 2, number % 2
            _pass_kernel[(pieces, count)](
                *source, top, floor, bounds[old], bounds[new], sums[old], sums[new],
                vocab, pieces, number, K=is_k, **sizes, **cut, num_warps=4,
            )  # fmt: skip
        last = (_PASSES - 1) % 2
        _settle_kernel[(count,)](
            temperature, columns, top, floor, edge, bounds[last], sums[last],
            vocab, pieces, _PASSES, K=is_k, **sizes, num_warps=1,
        )  # fmt: skip
    return edge


def masks_of(draws: SamplingInputs, unused: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
    """Returns a kernel's mask arguments: the grammars' index, octets and stride, the early stops and their
    strides; ``unused`` in place of what is absent."""
    allowed, stops = draws.allowed, draws.early_stops
    grammars = (
        (unused, unused, 0) if allowed is None else (allowed.index, allowed.octets, allowed.octets.stride(0))
    )
    return *grammars, *((unused, 0, 0) if stops is None else (stops, stops.stride(0), stops.stride(1)))


def masks_in_use(draws: SamplingInputs) -> dict[str, int]:
    """Returns the constants of ``is_out`` that say which masks there are."""
    return {"MASKED": draws.allowed is not None, "STOPS": 0 if draws.early_stops is None else EARLY_STOPS}
