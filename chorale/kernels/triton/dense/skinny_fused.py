"""Dense products of up to 16 tokens in one kernel (loop: ``skinny_ptx.py``). NVIDIA since sm_90, bfloat16.

Tensors have one element per thread. After the product, lane ``4 g + t`` of a warp has rows ``2 t`` and ``2 t
+ 1`` of one unit for token ``g`` (or ``8 + g``); one warp writes each such result.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from chorale.kernels.triton.dense.skinny_ptx import Product, product_text
from chorale.kernels.triton.kv_elements import store_pairs
from chorale.kernels.triton.launch import dependent
from chorale.kernels.triton.tuning import SkinnyConfig


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
def _inputs(x_ptr, T, lane, warp, K: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the addresses of a lane's inputs, by column; for missing tokens, those of the last token."""
    inputs: tl.tuple = ()
    for column in tl.static_range(COLUMNS):
        row = tl.minimum(lane // 4 + 8 * column, T - 1)
        inputs += ((x_ptr + row * K + warp * (GROUP * 32) + lane % 4 * 8).to(tl.int64),)
    return inputs


@triton.jit
def _qkv_places(
    w_ptr, b_ptr, rope_ptr, slots_ptr, T, lane, warp, unit, token,
    K: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return (addresses of a lane's weights, head and pair of its result, addresses of early reads)."""
    half: tl.constexpr = D // 2
    row = lane // 8 + lane // 4 % 2 * half  # i0, i0 + D/2, i0 + 1, ...: one thread has both rows of a pair
    weights = (w_ptr + row * K + warp * (GROUP * 32) + lane % 4 * 8).to(tl.int64)
    head = unit // (D // 8)
    pair = unit % (D // 8) * 4 + lane % 4
    there = tl.minimum(token, T - 1)
    bias = (b_ptr + head * D + pair).to(tl.int64)
    rope = (rope_ptr + there * D + pair).to(tl.int64)
    slots = (slots_ptr + there).to(tl.int64)
    return weights, head, pair, (bias, bias + 2 * half, rope, rope + 4 * half, slots)


@triton.jit(do_not_specialize=["T"])
def _project_kernel(
    x_ptr,  # [T, K] bfloat16
    w_ptr,  # [N, K] bfloat16
    b_ptr,  # [N] bfloat16
    residual_ptr,  # [T, N] float32
    T,
    N,
    K: tl.constexpr,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TEXT: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
):
    lane, warp, first, unit, token, ours = _place(T, UNITS, COLUMNS, WARPS)
    weights = (w_ptr + (lane // 4) * K + warp * (GROUP * 32) + lane % 4 * 8).to(tl.int64)
    row = unit * 8 + lane % 4 * 2
    bias = (b_ptr + (row if HAS_BIAS else row * 0)).to(tl.int64)
    places = residual_ptr + tl.minimum(token, T - 1) * N + row
    before = places.to(tl.int64)
    inputs = _inputs(x_ptr, T, lane, warp, K, GROUP, COLUMNS)
    operands = (weights, first, weights) + inputs + (bias, bias + 2, before, before + 4)  # noqa: RUF005
    left, right, bias_left, bias_right, left_before, right_before = tl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, operands, is_pure=False, pack=1, dtype=(tl.float32,) * 6
    )
    if HAS_BIAS:
        left += bias_left
        right += bias_right
    tl.store(places, left_before + left, mask=ours)
    tl.store(places + 1, right_before + right, mask=ours)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["slots_ptr"])
def _qkv_kernel(
    x_ptr,  # [T, K]: float32, or normed in bfloat16
    norm_ptr,  # [K] float32; None: x is normed
    w_ptr,  # [(Nq + 2 Nkv) * D, K] bfloat16
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
    GROUP: tl.constexpr,
    TEXT: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
):
    lane, warp, first, unit, token, ours = _place(T, UNITS, COLUMNS, WARPS)
    weights, head, pair, early = _qkv_places(
        w_ptr, b_ptr, rope_ptr, slots_ptr, T, lane, warp, unit, token, K, D, GROUP
    )
    norm = weights if norm_ptr is None else (norm_ptr + warp * (GROUP * 32) + lane % 4 * 8).to(tl.int64)
    inputs = _inputs(x_ptr, T, lane, warp, K, GROUP, COLUMNS)
    operands = (weights, first, norm) + inputs + early  # noqa: RUF005  (Triton has no stars)
    if norm_ptr is None:
        left, right, bias_left, bias_right, cos, sin, slot = tl.inline_asm_elementwise(
            TEXT, CONSTRAINTS, operands, is_pure=False, pack=1, dtype=(tl.float32,) * 6 + (tl.int64,)
        )
        left += bias_left
        right += bias_right
    else:
        left, right, squares, bias_left, bias_right, cos, sin, slot = tl.inline_asm_elementwise(
            TEXT, CONSTRAINTS, operands, is_pure=False, pack=1, dtype=(tl.float32,) * 7 + (tl.int64,)
        )
        scale = 1.0 / tl.sqrt(squares / K + eps)
        left = left * scale + bias_left
        right = right * scale + bias_right
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
    GROUP: tl.constexpr,
    TEXT: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
):
    lane, warp, first, unit, token, ours = _place(T, UNITS, COLUMNS, WARPS)
    weights = (w_ptr + (lane // 4) * H + warp * (GROUP * 32) + lane % 4 * 8).to(tl.int64)
    norm = (norm_ptr + warp * (GROUP * 32) + lane % 4 * 8).to(tl.int64)
    operands = (weights, first, norm) + _inputs(x_ptr, T, lane, warp, H, GROUP, COLUMNS)  # noqa: RUF005
    gate, up, squares = tl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, operands, is_pure=False, pack=1, dtype=(tl.float32,) * 3
    )
    scale = 1.0 / tl.sqrt(squares / H + eps)
    gate = gate * scale
    result = gate / (1.0 + tl.exp(-gate)) * (up * scale)
    tl.store(out_ptr + token * I + unit * 4 + lane % 4, result.to(out_ptr.dtype.element_ty), mask=ours)


def product_of(tile: SkinnyConfig, tokens: int, depth: int, head_dim: int, pdl: bool) -> Product:
    """Return the loop for QKV with heads of ``head_dim``, or with 0 for an output projection."""
    return Product(
        tile.units, 1 if tokens <= 8 else 2, tile.num_warps, tile.group, tile.groups, tile.ahead, depth,
        head_dim, norm=head_dim > 0, early="bbffl" if head_dim else "bbff", pdl=pdl,
    )  # fmt: skip


@functools.cache
def constants_of(p: Product) -> dict[str, Any]:
    return {
        "UNITS": p.units,
        "COLUMNS": p.columns,
        "WARPS": p.warps,
        "GROUP": p.group,
        "TEXT": product_text(p),
        "CONSTRAINTS": p.constraints,
        "num_warps": p.warps,
    }


def fits(tile: SkinnyConfig, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether these kernels can run: bfloat16, Hopper or later, complete tiles of rows and
    columns."""
    there = dependent(x)["PDL"] and weight.dtype == torch.bfloat16
    return there and weight.shape[0] % (8 * tile.units) == 0 and weight.shape[1] % 32 == 0


def _whole(rows: int, tile: SkinnyConfig) -> None:
    if rows % (8 * tile.units):
        raise ValueError(f"{rows} rows are not tiles of {8 * tile.units}")


def project(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    tile: SkinnyConfig,
) -> torch.Tensor:
    """residual [T, N] float32 += x [T, K] weight^T + bias, x in the weight's dtype; returns residual."""
    tokens, (rows, depth) = x.shape[0], weight.shape
    _whole(rows, tile)
    launch = dependent(x)
    constants = constants_of(product_of(tile, tokens, depth, 0, launch.pop("PDL")))
    _project_kernel[(rows // (8 * tile.units),)](
        x, weight, weight if bias is None else bias, residual, tokens, rows,
        K=depth, HAS_BIAS=bias is not None, **constants, **launch,
    )  # fmt: skip
    return residual


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
    weight: torch.Tensor,
    bias: torch.Tensor,
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
    tokens, (rows, depth) = x.shape[0], weight.shape
    _whole(rows, tile)
    launch = dependent(x)
    product = replace(product_of(tile, tokens, depth, sizes["D"], launch.pop("PDL")), norm=norm is not None)
    _qkv_kernel[(rows // (8 * tile.units),)](
        x, norm, weight, bias, rope, slots, q, kv, eps, tokens, K=depth, **sizes, **constants_of(product),
        **launch,
    )  # fmt: skip
