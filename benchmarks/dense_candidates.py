"""Kernels that ``gpu_dense.py`` times beside the product's, and the stand-ins around them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.triton.launch import dependent, wait_for_previous


@triton.jit
def _early_weights(w_ptr, rows, inside, k, K, DEPTH: tl.constexpr):
    depth = k + tl.arange(0, DEPTH)
    places = w_ptr + rows[:, None].to(tl.int64) * K + depth[None, :]
    return tl.load(places, mask=inside[:, None] & (depth < K)[None, :], other=0.0)


@triton.jit
def _times(
    acc, w, x_ptr, norm_ptr, tokens, present, k, K, NORM: tl.constexpr, DEPTH: tl.constexpr
):  # acc + w [ROWS, DEPTH] x[:, k:]
    depth = k + tl.arange(0, DEPTH)
    some = depth < K
    x = tl.load(
        x_ptr + tokens[:, None] * K + depth[None, :], mask=present[:, None] & some[None, :], other=0.0
    )
    if NORM:
        x = x * tl.load(norm_ptr + depth, mask=some, other=0.0)[None, :]
    return tl.dot(w, tl.trans(x.to(w.dtype)), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["T"])
def _early_kernel(
    x_ptr,  # [T, K]
    norm_ptr,  # [K] float32 (if NORM)
    w_ptr,  # [N, K]
    part_ptr,  # [SPLITS, T, N] float32
    T,
    N,
    K: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,  # a program has four times as many columns, all in registers before it waits
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    tokens = tl.arange(0, TOKENS)
    inside, present = rows < N, tokens < T
    first = split * 4 * DEPTH
    w0 = _early_weights(w_ptr, rows, inside, first, K, DEPTH)
    w1 = _early_weights(w_ptr, rows, inside, first + DEPTH, K, DEPTH)
    w2 = _early_weights(w_ptr, rows, inside, first + 2 * DEPTH, K, DEPTH)
    w3 = _early_weights(w_ptr, rows, inside, first + 3 * DEPTH, K, DEPTH)
    wait_for_previous(PDL, LAUNCH_DEPENDENTS=False)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    acc = _times(acc, w0, x_ptr, norm_ptr, tokens, present, first, K, NORM, DEPTH)
    acc = _times(acc, w1, x_ptr, norm_ptr, tokens, present, first + DEPTH, K, NORM, DEPTH)
    acc = _times(acc, w2, x_ptr, norm_ptr, tokens, present, first + 2 * DEPTH, K, NORM, DEPTH)
    acc = _times(acc, w3, x_ptr, norm_ptr, tokens, present, first + 3 * DEPTH, K, NORM, DEPTH)
    places = part_ptr + (split * T + tokens[None, :]) * N + rows[:, None]
    tl.store(places, acc, mask=inside[:, None] & present[None, :])


def early_parts(
    x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor | None, rows: int, depth: int, warps: int
) -> torch.Tensor:
    """As ``skinny.parts``."""
    tokens, (num_rows, columns) = x.shape[0], weight.shape
    splits = triton.cdiv(columns, 4 * depth)
    out = torch.empty(splits, tokens, num_rows, dtype=torch.float32, device=x.device)
    _early_kernel[(triton.cdiv(num_rows, rows), splits)](
        x, x if norm is None else norm, weight, out, tokens, num_rows,
        K=columns, NORM=norm is not None, ROWS=rows, TOKENS=16, DEPTH=depth, num_warps=warps, **dependent(x),
    )  # fmt: skip
    return out


@triton.jit
def _attend_kernel(q_ptr, out_ptr, SIZE: tl.constexpr, PDL: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    wait_for_previous(PDL)
    tl.store(out_ptr + place, tl.load(q_ptr + place))


@triton.jit
def _damp_kernel(x_ptr, size, SIZE: tl.constexpr, PDL: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    wait_for_previous(PDL)
    tl.store(x_ptr + place, tl.load(x_ptr + place, mask=place < size) * 0.5, mask=place < size)


def attend(q: torch.Tensor, out: torch.Tensor) -> None:
    """In attention's place: a small kernel between QKV and output projection."""
    _attend_kernel[(q.numel() // 64,)](q, out, SIZE=64, num_warps=1, **dependent(q))


def damp(x: torch.Tensor) -> None:
    """In the place of what is between output projection and QKV; also keeps the residual bounded."""
    _damp_kernel[(triton.cdiv(x.numel(), 256),)](x, x.numel(), SIZE=256, num_warps=1, **dependent(x))
