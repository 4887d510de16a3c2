"""Samples in one pass over the logits, with filters reduced to a threshold and noise generated in registers.

The integers of the noise equal those of ``kernels/reference/sampling/noise.py``; its two logarithms are
accurate where the noise is large. One kernel finds the best token of each piece of a row, a second kernel the
best of the row, which it also stores for the next step. A row's token depends only on the row.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from chorale.kernels.ops import NO_FINITE_LOGITS, NOTHING_ALLOWED, Sample, SamplingInputs
from chorale.kernels.reference.sampling.token_columns import TokenColumns
from chorale.kernels.triton.launch import is_nvidia
from chorale.kernels.triton.sampling.masks import is_out, masks_in_use, masks_of
from chorale.kernels.triton.sampling.thresholds import thresholds

_NONE = tl.constexpr(NO_FINITE_LOGITS)
_FORBIDDEN = tl.constexpr(NOTHING_ALLOWED)
_STEP = tl.constexpr(0x9E3779B9)
_FIRST = tl.constexpr(0x21F0AAAD)
_SECOND = tl.constexpr(0x735A2D97)


@triton.jit
def _log(x, ASM: tl.constexpr):
    """Return the natural logarithm; with ASM within 1e-7 (absolute between 1/2 and 2), in two
    instructions."""
    if ASM:
        result = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1; mul.f32 $0, $0, 0f3F317218;", "=f,f", [x], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        result = tl.log(x)
    return result


@triton.jit
def gumbel(tokens, a, b, ASM: tl.constexpr):
    """Return noise [N] float32 for tokens [N]; a and b: the key's words (uint32)."""
    x = tokens.to(tl.uint32) * _STEP + a
    x ^= x >> 16
    x *= _FIRST
    x ^= b
    x ^= x >> 15
    x *= _SECOND
    x ^= x >> 15
    v = (x >> 1).to(tl.int32).to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10
    v = tl.minimum(v, 0.99999994)
    # -log1p(-v): 1 - v would lose the low bits of a small v, where the noise is large.
    series = 0.16666667 + v * (0.14285715 + v * (0.125 + v * 0.11111111))
    series = v * (1.0 + v * (0.5 + v * (0.33333333 + v * (0.25 + v * (0.2 + v * series)))))
    return -_log(tl.where(v < 0.125, series, -_log(1.0 - v, ASM)), ASM)


# Columns start at any offset of a step's numbers; kernels specialised by alignment would be too many.
_COLUMNS = ["keys_ptr", "temperature_ptr", "rows_ptr", "out_ptr", "index_ptr", "stops_ptr"]
_STRIDES = ["key_stride", "word_stride", "stops_stride", "stop_stride"]


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_COLUMNS)
def _pieces_kernel(
    logits_ptr,  # [N, V] float32
    keys_ptr,  # [N, 2] int32
    temperature_ptr,  # [N] float32
    edge_ptr,  # [N] float32: threshold of the scores (if FILTERED)
    forbidden_ptr,  # [V] uint8
    index_ptr,  # [N] int32 (if MASKED)
    octets_ptr,  # [G, octets_stride] uint8
    octets_stride,
    stops_ptr,  # [N, STOPS] int32 (if STOPS)
    stops_stride,
    stop_stride,
    best_ptr,  # [N, PIECES] float32
    token_ptr,  # [N, PIECES] int32
    most_ptr,  # [N, PIECES] float32: the largest raw logit, +inf if there is a NaN
    V,
    stride,
    key_stride,
    word_stride,
    pieces,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks per piece
    FILTERED: tl.constexpr,
    MASKED: tl.constexpr,
    STOPS: tl.constexpr,
    ASM: tl.constexpr,
    FIRST: tl.constexpr,  # the token id of column 0
    ids_ptr=None,  # [V] int64: the token id of each column, instead of FIRST
):
    row, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    a = tl.load(keys_ptr + row * key_stride).to(tl.uint32, bitcast=True)
    b = tl.load(keys_ptr + row * key_stride + word_stride).to(tl.uint32, bitcast=True)
    edge = -float("inf")
    if FILTERED:
        edge = tl.load(edge_ptr + row)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    chosen = tl.full((BLOCK,), 2147483647, tl.int32)
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    for block in range(BLOCKS):
        tokens = (piece * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < V
        raw = tl.load(logits_ptr + row * stride + tokens, mask=inside, other=-float("inf"))
        most = tl.maximum(most, tl.where(raw == raw, raw, float("inf")))
        out = is_out(
            forbidden_ptr, index_ptr, octets_ptr, octets_stride, stops_ptr, stops_stride, stop_stride,
            row, tokens, V, MASKED, STOPS, FIRST,
        )  # fmt: skip
        scores = raw
        if temperature > 0:
            heat = raw / temperature
            if ids_ptr is None:
                noise = gumbel(tokens + FIRST, a, b, ASM)
            else:
                noise = gumbel(tl.load(ids_ptr + tokens, mask=inside, other=0), a, b, ASM)
            scores = tl.where(heat >= edge, heat + noise, -float("inf"))
        scores = tl.where((scores == scores) & ~out, scores, -float("inf"))
        better = scores > best
        best = tl.where(better, scores, best)
        chosen = tl.where(better, tokens, chosen)
    top = tl.max(best, 0)
    place = row * pieces + piece
    tl.store(best_ptr + place, top)
    tl.store(token_ptr + place, tl.min(tl.where(best == top, chosen, 2147483647), 0))
    tl.store(most_ptr + place, tl.max(most, 0))


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _rows_kernel(
    best_ptr,
    token_ptr,
    most_ptr,
    rows_ptr,  # [N] int32
    last_ptr,  # [rows] int64
    out_ptr,  # [N] int64
    pieces,
    PIECES: tl.constexpr,
    ids_ptr=None,  # [columns] int64: the token id of each column; None: columns are token ids
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PIECES)
    inside = places < pieces
    best = tl.load(best_ptr + row * pieces + places, mask=inside, other=-float("inf"))
    tokens = tl.load(token_ptr + row * pieces + places, mask=inside, other=2147483647)
    most = tl.max(tl.load(most_ptr + row * pieces + places, mask=inside, other=-float("inf")), 0)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, tokens, 2147483647), 0).to(tl.int64)
    infinite = float("inf")
    if ids_ptr is not None:
        found = (top > -infinite) & (top < infinite)
        token = tl.load(ids_ptr + token, mask=found, other=0)
    token = tl.where((top > -infinite) & (top < infinite), token, _FORBIDDEN)
    token = tl.where((most > -infinite) & (most < infinite), token, _NONE)
    tl.store(out_ptr + row, token)
    tl.store(last_ptr + tl.load(rows_ptr + row), tl.maximum(token, 0))


def _shape(count: int) -> tuple[int, int]:
    """Returns (tokens per block, blocks per piece): more pieces for few rows."""
    return (1024, 1) if count <= 8 else (1024, 8)


def best_of_pieces(
    logits: torch.Tensor,
    draws: SamplingInputs,
    forbidden: torch.Tensor,
    edge: torch.Tensor | None,
    first: int = 0,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find for each piece of a row, [N, PIECES], the largest score, its column and the largest raw logit.

    ``edge`` [N]: threshold of the scores. ``first``: the token id of column 0. ``ids``: the token ids of all
    columns.
    """
    count, vocab = logits.shape
    block, blocks = _shape(count)
    pieces = triton.cdiv(vocab, block * blocks)
    best = torch.empty(count, pieces, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(count, pieces, dtype=torch.int32, device=logits.device)
    most = torch.empty(count, pieces, dtype=torch.float32, device=logits.device)
    keys = draws.keys
    _pieces_kernel[(pieces, count)](
        logits, keys, draws.temperature, best if edge is None else edge, forbidden,
        *masks_of(draws, forbidden), best, tokens, most,
        vocab, logits.stride(0), keys.stride(0), keys.stride(1), pieces,
        BLOCK=block, BLOCKS=blocks, FILTERED=edge is not None,
        **masks_in_use(draws), ASM=is_nvidia(logits.device), FIRST=first, **_of(ids), num_warps=4,
    )  # fmt: skip
    return best, tokens, most


def _of(ids: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return launch arguments. Without ids the parameter is omitted, so that the kernel stays the same."""
    return {} if ids is None else {"ids_ptr": ids}


def sample(
    forbidden: torch.Tensor,
    logits: torch.Tensor,
    draws: SamplingInputs,
    last_token: torch.Tensor,
    out: torch.Tensor,
    columns: TokenColumns | None = None,
) -> None:
    """Sample logits [N, V] float32 -> out [N] int64, and ``last_token`` at ``draws.rows``. ``columns``: the
    tokens of the logits' columns; ``forbidden`` is by column."""
    ids = None if columns is None else columns.ids
    if columns is not None:
        draws = columns.masks(draws)
    edge = None if draws.filters is None else thresholds(logits, draws, forbidden)
    best, tokens, most = best_of_pieces(logits, draws, forbidden, edge, ids=ids)
    count, pieces = best.shape
    _rows_kernel[(count,)](
        best, tokens, most, draws.rows, last_token, out, pieces,
        PIECES=triton.next_power_of_2(pieces), **_of(ids), num_warps=1,
    )  # fmt: skip


def make_sampler(forbidden: torch.Tensor, rows_at_once: int, *, ids: torch.Tensor | None = None) -> Sample:
    """``Ops.make_sampler``. All rows of a step are sampled at once."""
    if ids is None:
        return functools.partial(sample, forbidden)
    return functools.partial(sample, forbidden[ids], columns=TokenColumns(ids, len(forbidden)))
