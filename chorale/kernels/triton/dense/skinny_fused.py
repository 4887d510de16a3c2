"""Dense products of up to 16 tokens in one kernel (loop: ``skinny_ptx.py``). NVIDIA since sm_90, bfloat16.

Tensors have one element per thread. After the product, lane ``4 g + t`` of a warp has rows ``2 t`` and ``2 t
+ 1`` of one unit for token ``g`` (or ``8 + g``); one warp writes each such result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from chorale.kernels.triton.dense.compact import BLOCK_BYTES, ROWS, Linear
from chorale.kernels.triton.dense.compact import SCALE as _SCALE
from chorale.kernels.triton.dense.skinny_ptx import Product, product_text
from chorale.kernels.triton.kv_elements import store_pairs
from chorale.kernels.triton.launch import dependent
from chorale.kernels.triton.tuning import SKINNY_TOKENS, SkinnyConfig

SCALE = tl.constexpr(_SCALE)
BLOCK = tl.constexpr(BLOCK_BYTES // 4)


@triton.jit
def _place(T, UNITS: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr):
    """Return (lane, warp, first unit, unit of the result, its token, whether this thread stores the
    token)."""
    thread = tl.arange(0, 32 * WARPS)
    lane, warp = thread % 32, thread // 32
    first = tl.program_id(0) * UNITS + lane * 0
    pick = warp % (UNITS * COLUMNS)
    token = pick % COLUMNS * 8 + lane // 4
    return lane, warp, first, first + pick // COLUMNS, token, (warp < UNITS * COLUMNS) & (token < T)


@triton.jit
def _inputs(
    x_ptr, T, lane, warp,
    K: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr, CHUNK: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Return the addresses of a lane's inputs, by column; for missing tokens, those of the last token. If
    ``STAGED``, that number of lanes load a chunk of the only token."""
    inputs: tl.tuple = ()
    if STAGED:
        place = (lane // STAGED * WARPS + warp) * CHUNK + lane % STAGED * (CHUNK // STAGED)
        return ((x_ptr + place).to(tl.int64),)
    for column in tl.static_range(COLUMNS):
        row = tl.minimum(lane // 4 + 8 * column, T - 1)
        inputs += ((x_ptr + row * K + warp * CHUNK + lane % 4 * 8).to(tl.int64),)
    return inputs


@triton.jit
def _weights(
    w_ptr, first, row, lane, warp,
    K: tl.constexpr, CHUNK: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """Return the addresses of a lane's weights: ``row`` of unit 0, or in the program's first block."""
    if COMPACT:
        places = w_ptr + (first.to(tl.int64) * (K // CHUNK) + warp) * BLOCK + lane * 4
    else:
        places = w_ptr + row * K + warp * CHUNK + lane % 4 * 8
    return places.to(tl.int64)


@triton.jit
def _qkv_places(
    w_ptr, scale_ptr, b_ptr, rope_ptr, slots_ptr, T, lane, warp, first, unit, token,
    K: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return (addresses of a lane's weights, head and pair of its result, addresses of early reads)."""
    half: tl.constexpr = D // 2
    row = lane // 8 + lane // 4 % 2 * half  # i0, i0 + D/2, i0 + 1, ...: one thread has both rows of a pair
    weights = _weights(w_ptr, first, row, lane, warp, K, CHUNK, scale_ptr is not None)
    head = unit // (D // 8)
    pair = unit % (D // 8) * 4 + lane % 4
    there = tl.minimum(token, T - 1)
    bias = (b_ptr + head * D + pair).to(tl.int64)
    rope = (rope_ptr + there * D + pair).to(tl.int64)
    slots = (slots_ptr + there).to(tl.int64)
    early: tl.tuple = (bias, bias + 2 * half, rope, rope + 4 * half, slots)
    if scale_ptr is not None:
        scale = (scale_ptr + head * D + pair).to(tl.int64)
        early += (scale, scale + 4 * half)
    return weights, head, pair, early


@triton.jit(do_not_specialize=["T"])
def _project_kernel(
    x_ptr,  # [T, K] bfloat16
    w_ptr,  # [N, K] bfloat16, or words of ``CompactRows``
    scale_ptr,  # [N] float32; None: bfloat16
    b_ptr,  # [N] bfloat16
    out_ptr,  # [T, N] float32
    T,
    N,
    K: tl.constexpr,
    ADD: tl.constexpr,  # out += instead of out =
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TEXT: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
):
    lane, warp, first, unit, token, ours = _place(T, UNITS, COLUMNS, WARPS)
    weights = _weights(w_ptr, first, lane // 4, lane, warp, K, CHUNK, scale_ptr is not None)
    # A thread has two rows: next to each other, or the pair of a unit of ``CompactRows``.
    apart: tl.constexpr = 1 if scale_ptr is None else 32
    row = unit * 8 + lane % 4 * 2 if scale_ptr is None else unit // 8 * 64 + unit % 8 * 4 + lane % 4
    bias = (b_ptr + (row if HAS_BIAS else row * 0)).to(tl.int64)
    places = out_ptr + tl.minimum(token, T - 1).to(tl.int64) * N + row
    before = places.to(tl.int64)
    inputs = _inputs(x_ptr, T, lane, warp, K, COLUMNS, WARPS, CHUNK, STAGED)
    operands = (weights, first, weights) + inputs + (bias, bias + 2 * apart, before, before + 4 * apart)  # noqa: RUF005
    scaled: tl.constexpr = 0 if scale_ptr is None else 2
    if scale_ptr is not None:
        scale = (scale_ptr + row).to(tl.int64)
        operands += (scale, scale + 4 * apart)
    results = tl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, operands, is_pure=False, pack=1, dtype=(tl.float32,) * (6 + scaled)
    )
    left, right = results[0], results[1]
    if scale_ptr is not None:
        left = left * SCALE * results[6]
        right = right * SCALE * results[7]
    if HAS_BIAS:
        left += results[2]
        right += results[3]
    if ADD:
        left += results[4]
        right += results[5]
    tl.store(places, left, mask=ours)
    tl.store(places + apart, right, mask=ours)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["slots_ptr"])
def _qkv_kernel(
    x_ptr,  # [T, K]: float32, or normed in bfloat16
    norm_ptr,  # [K] float32; None: x is normed
    w_ptr,  # [(Nq + 2 Nkv) * D, K] bfloat16, or words of ``CompactRows``
    scale_ptr,  # [(Nq + 2 Nkv) * D] float32; None: bfloat16
    b_ptr,  # [(Nq + 2 Nkv) * D] bfloat16
    rope_ptr,  # [T, D] float32
    slots_ptr,  # [T] int64
    q_ptr,  # [T, Nq, D]
    kv_ptr,  # [blocks, 2, Nkv, KV_BLOCK, D]
    eps,
    T,
    K: tl.constexpr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGED: tl.constexpr,
    TEXT: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
):
    lane, warp, first, unit, token, ours = _place(T, UNITS, COLUMNS, WARPS)
    weights, head, pair, early = _qkv_places(
        w_ptr, scale_ptr, b_ptr, rope_ptr, slots_ptr, T, lane, warp, first, unit, token, K, D, CHUNK
    )
    norm = _inputs(x_ptr if norm_ptr is None else norm_ptr, 1, lane, warp, K, 1, WARPS, CHUNK, STAGED)[0]
    inputs = _inputs(x_ptr, T, lane, warp, K, COLUMNS, WARPS, CHUNK, STAGED)
    operands = (weights, first, norm) + inputs + early  # noqa: RUF005  (Triton has no stars)
    scaled: tl.constexpr = 0 if scale_ptr is None else 2
    squared: tl.constexpr = 0 if norm_ptr is None else 1
    results = tl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, operands, is_pure=False, pack=1,
        dtype=(tl.float32,) * (6 + squared) + (tl.int64,) + (tl.float32,) * scaled,
    )  # fmt: skip
    left, right = results[0], results[1]
    if scale_ptr is not None:
        left = left * SCALE * results[squared + 7]
        right = right * SCALE * results[squared + 8]
    if norm_ptr is not None:
        scale = 1.0 / tl.sqrt(results[2] / K + eps)
        left *= scale
        right *= scale
    left += results[squared + 2]
    right += results[squared + 3]
    cos, sin, slot = results[squared + 4], results[squared + 5], results[squared + 6]
    store_pairs(
        left, right, cos, sin, slot, token, head, pair, ours, q_ptr, kv_ptr, NUM_Q, NUM_KV, D, KV_BLOCK
    )


@triton.jit(do_not_specialize=["T"])
def _gated_kernel(
    x_ptr,  # [T, H] float32
    norm_ptr,  # [H] float32
    w_ptr,  # [2 I, H] bfloat16: gate 0, up 0, gate 1, ...
    out_ptr,  # [T, I]
    eps,
    T,
    I,
    H: tl.constexpr,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGED: tl.constexpr,
    TEXT: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
):
    lane, warp, first, unit, token, ours = _place(T, UNITS, COLUMNS, WARPS)
    weights = _weights(w_ptr, first, lane // 4, lane, warp, H, CHUNK, False)
    norm = _inputs(norm_ptr, 1, lane, warp, H, 1, WARPS, CHUNK, STAGED)[0]
    operands = (weights, first, norm) + _inputs(x_ptr, T, lane, warp, H, COLUMNS, WARPS, CHUNK, STAGED)  # noqa: RUF005
    gate, up, squares = tl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, operands, is_pure=False, pack=1, dtype=(tl.float32,) * 3
    )
    scale = 1.0 / tl.sqrt(squares / H + eps)
    gate = gate * scale
    result = gate / (1.0 + tl.exp(-gate)) * (up * scale)
    tl.store(out_ptr + token * I + unit * 4 + lane % 4, result.to(out_ptr.dtype.element_ty), mask=ours)


def product_of(
    tile: SkinnyConfig, tokens: int, depth: int, head_dim: int, pdl: bool, *, is_compact: bool = False
) -> Product:
    """Return the loop for QKV with heads of ``head_dim``, or with 0 for a plain product."""
    early = ("bbffl" if head_dim else "bbff") + ("cc" if is_compact else "")
    return Product(
        tile.units, 1 if tokens <= 8 else 2, tile.num_warps, tile.slots, tile.ahead, depth, head_dim,
        norm=head_dim > 0, early=early, pdl=pdl, is_compact=is_compact, is_staged=is_compact and tokens == 1,
    )  # fmt: skip


@functools.cache
def constants_of(p: Product) -> dict[str, Any]:
    return {
        "UNITS": p.units,
        "COLUMNS": p.columns,
        "WARPS": p.warps,
        "CHUNK": p.depth // p.chunks,
        "STAGED": 32 // p.rounds_per_load if p.is_staged else 0,
        "TEXT": product_text(p),
        "CONSTRAINTS": p.constraints,
        "num_warps": p.warps,
    }


def fits(tile: SkinnyConfig, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether these kernels can run: bfloat16, Hopper or later, complete tiles of rows and
    columns."""
    there = dependent(x)["PDL"] and weight.dtype == torch.bfloat16
    return there and weight.shape[0] % (8 * tile.units) == 0 and weight.shape[1] % 32 == 0


Shape = Callable[[int], SkinnyConfig | None]  # by the number of tokens


def shape_of(
    x: torch.Tensor, linear: Linear, compact: Shape, plain: Shape | None = None
) -> SkinnyConfig | None:
    """Return the shape of a product with ``linear`` in one kernel: ``compact`` if it has such rows, else
    ``plain``. None: another kernel is faster, or these cannot run."""
    tokens, rows = x.shape[0], linear.weight.shape[0]
    if linear.compact is None:
        tile = None if plain is None else plain(tokens)
        return tile if tile is not None and fits(tile, x, linear.weight) else None
    tile = compact(tokens) if 0 < tokens <= SKINNY_TOKENS else None
    return tile if tile is None else replace(tile, units=math.gcd(tile.units, rows // 8))


def _whole(rows: int, tile: SkinnyConfig) -> None:
    if rows % (8 * tile.units):
        raise ValueError(f"{rows} rows are not tiles of {8 * tile.units}")


def _operands(linear: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (weights, or the words of compact rows; the scales of these)."""
    if linear.compact is None:
        return linear.weight, None
    return linear.compact.words, linear.compact.scales


def project(
    x: torch.Tensor, linear: Linear, residual: torch.Tensor | None, tile: SkinnyConfig
) -> torch.Tensor:
    """residual [T, N] float32 += x [T, K] weight^T + bias, x in the weight's dtype; returns residual, or
    without residual the product."""
    tokens, (rows, depth) = x.shape[0], linear.weight.shape
    out = x.new_empty(tokens, rows, dtype=torch.float32) if residual is None else residual
    _whole(rows, tile)
    launch = dependent(x)
    weights, scales = _operands(linear)
    product = product_of(tile, tokens, depth, 0, launch.pop("PDL"), is_compact=scales is not None)
    _project_kernel[(rows // (8 * tile.units),)](
        x, weights, scales, linear.weight if linear.bias is None else linear.bias, out, tokens, rows,
        K=depth, ADD=residual is not None, HAS_BIAS=linear.bias is not None,
        **constants_of(product), **launch,
    )  # fmt: skip
    return out


def gated(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    tile: SkinnyConfig,
) -> None:
    """``DraftOps.gated_silu`` for 1 to 16 tokens; writes out [T, I]."""
    tokens, (rows, hidden) = x.shape[0], weight.shape
    _whole(rows, tile)
    launch = dependent(x)
    plain = product_of(tile, tokens, hidden, 0, launch.pop("PDL"))
    constants = constants_of(replace(plain, norm=True, early=""))
    _gated_kernel[(rows // (8 * tile.units),)](
        x, norm, weight, out, eps, tokens, rows // 2, H=hidden, **constants, **launch
    )


def qkv(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    linear: Linear,
    eps: float,
    rope: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    sizes: dict[str, int],
    tile: SkinnyConfig,
) -> None:
    """``qkv.qkv_rope_cache`` for up to 16 tokens; writes q and kv. ``norm``: None if x is normed, in the
    weight's dtype. ``sizes``: NUM_Q, NUM_KV, D, KV_BLOCK."""
    tokens, (rows, depth) = x.shape[0], linear.weight.shape
    _whole(rows, tile)
    launch = dependent(x)
    weights, scales = _operands(linear)
    if scales is not None and sizes["D"] != ROWS:
        raise ValueError(f"compact rows of heads of {sizes['D']}")
    product = product_of(tile, tokens, depth, sizes["D"], launch.pop("PDL"), is_compact=scales is not None)
    product = replace(product, norm=norm is not None)
    _qkv_kernel[(rows // (8 * tile.units),)](
        x, norm, weights, scales, linear.bias, rope, slots, q, kv, eps, tokens,
        K=depth, **sizes, **constants_of(product), **launch,
    )  # fmt: skip
