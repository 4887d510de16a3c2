"""A draft head's QKV, and its gate and up, for up to 16 tokens in one kernel each, with the loop of
``skinny_ptx.py``. NVIDIA since sm_90, bfloat16; ``skinny_fused.py`` describes how tensors are distributed
over threads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from chorale.kernels.triton.dense.skinny_fused import (
    _inputs,
    _launch,
    _place,
    _qkv_places,
    _whole,
    constants_of,
    product_of,
)
from chorale.kernels.triton.kv_elements import store_pairs
from chorale.kernels.triton.tuning import SkinnyConfig


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


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["slots_ptr"])
def _qkv_kernel(
    x_ptr,  # [T, K] bfloat16, normed
    w_ptr,  # [(Nq + 2 Nkv) * D, K] bfloat16
    b_ptr,  # [(Nq + 2 Nkv) * D] bfloat16
    rope_ptr,  # [T, D] float32
    slots_ptr,  # [T] int64
    q_ptr,  # [T, Nq, D]
    kv_ptr,  # [blocks, 2, Nkv, KV_BLOCK, D]
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
    """Like ``skinny_fused._qkv_kernel``, without the norm."""
    lane, warp, first, unit, token, ours = _place(T, UNITS, COLUMNS, WARPS)
    weights, head, pair, early = _qkv_places(
        w_ptr, b_ptr, rope_ptr, slots_ptr, T, lane, warp, unit, token, K, D, GROUP
    )
    inputs = _inputs(x_ptr, T, lane, warp, K, GROUP, COLUMNS)
    operands = (weights, first, weights) + inputs + early  # noqa: RUF005
    left, right, bias_left, bias_right, cos, sin, slot = tl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, operands, is_pure=False, pack=1, dtype=(tl.float32,) * 6 + (tl.int64,)
    )
    left += bias_left
    right += bias_right
    store_pairs(
        left, right, cos, sin, slot, token, head, pair, ours, q_ptr, kv_ptr, NUM_Q, NUM_KV, D, KV_BLOCK
    )


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
    launch = _launch(x, tile)
    plain = product_of(tile, tokens, hidden, 0, launch.pop("PDL"))
    constants = constants_of(replace(plain, norm=True, early=""))
    _gated_kernel[(rows // (8 * tile.units),)](
        x, norm, weight, out, eps, tokens, rows // 2, H=hidden, **constants, **launch
    )


def qkv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    sizes: dict[str, int],
    tile: SkinnyConfig,
) -> None:
    """``DraftOps.qkv_rope_cache`` for 1 to 16 tokens; writes q and kv. ``sizes``: NUM_Q, NUM_KV, D,
    KV_BLOCK."""
    tokens, (rows, depth) = x.shape[0], weight.shape
    _whole(rows, tile)
    launch = _launch(x, tile)
    normed = product_of(tile, tokens, depth, sizes["D"], launch.pop("PDL"))
    constants = constants_of(replace(normed, norm=False))
    _qkv_kernel[(rows // (8 * tile.units),)](
        x, weight, bias, rope, slots, q, kv, tokens, K=depth, **sizes, **constants, **launch
    )
