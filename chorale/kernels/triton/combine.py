"""What the expert layer's products end with: SwiGLU in registers, and the sum of a token's experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.triton.launch import dependent, wait_for_previous


@triton.jit
def swiglu(gate, up, limit, alpha):
    # Comparisons, because minimum() drops NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)


@triton.jit
def _sum_kernel(
    parts_ptr,  # [T, K, H] float32
    x_ptr,  # [T, H] float32
    H,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    wait_for_previous(PDL)
    x = tl.load(x_ptr + token * H + columns, mask=inside, other=0.0)
    for k in tl.static_range(K):
        x += tl.load(parts_ptr + (token * K + k) * H + columns, mask=inside, other=0.0)
    tl.store(x_ptr + token * H + columns, x, mask=inside)


def add_parts(parts: torch.Tensor, x: torch.Tensor) -> None:
    """x [T, H] float32 += parts [T, K, H] float32 over K, always in this order."""
    tokens, each, hidden = parts.shape
    block = min(1024, triton.next_power_of_2(hidden)) if tokens > 8 else 256
    grid = (tokens, triton.cdiv(hidden, block))
    _sum_kernel[grid](parts, x, hidden, K=each, BLOCK=block, num_warps=block // 256 or 1, **dependent(x))
