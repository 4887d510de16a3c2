"""Dense products. Few tokens: a kernel that streams the weights once. Many: cuBLAS.

The streaming kernel has two forms. One token: no tensor core, each thread multiplies and adds what it loads.
Up to 16: weights are the rows of a ``tl.dot`` whose 16 columns are the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from chorale.kernels.triton import tuning


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x weight^T + bias, in the weight's dtype."""

    weight: torch.Tensor  # [N, K] contiguous
    bias: torch.Tensor | None  # [N]


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """weight [N, K] as in the checkpoint: rows are already what a program streams."""
    return Linear(weight.contiguous(), bias if bias is None else bias.contiguous())


def pack_head(weight: torch.Tensor) -> Linear:
    return pack_linear(weight, None)


@triton.jit
def _small_kernel(
    x_ptr,  # [T, K]
    w_ptr,  # [N, K], in x's dtype
    b_ptr,  # [N]
    out_ptr,  # [T, N] float32
    T,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,  # out += instead of out =
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    inside = rows < N
    weights = w_ptr + rows[:, None].to(tl.int64) * K + depth[None, :]
    if TOKENS == 1:
        products = tl.zeros((ROWS, DEPTH), tl.float32)
        for k in tl.range(0, K, DEPTH, num_stages=STAGES):
            some = k + depth < K
            w = tl.load(weights + k, mask=inside[:, None] & some[None, :], other=0.0)
            x = tl.load(x_ptr + k + depth, mask=some, other=0.0)
            products += w.to(tl.float32) * x.to(tl.float32)[None, :]
        total = tl.sum(products, 1)
        if HAS_BIAS:
            total += tl.load(b_ptr + rows, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            total += tl.load(out_ptr + rows, mask=inside, other=0.0)
        tl.store(out_ptr + rows, total, mask=inside)
    else:
        tokens = tl.arange(0, TOKENS)
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        for k in tl.range(0, K, DEPTH, num_stages=STAGES):
            some = k + depth < K
            w = tl.load(weights + k, mask=inside[:, None] & some[None, :], other=0.0)
            x = tl.load(
                x_ptr + tokens[None, :] * K + k + depth[:, None],
                mask=some[:, None] & (tokens < T)[None, :],
                other=0.0,
            )
            acc = tl.dot(w, x, acc, input_precision="ieee")
        if HAS_BIAS:
            acc += tl.load(b_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
        places = out_ptr + tokens[None, :].to(tl.int64) * N + rows[:, None]
        mask = inside[:, None] & (tokens < T)[None, :]
        if ADD:
            acc += tl.load(places, mask=mask, other=0.0)
        tl.store(places, acc, mask=mask)


def _stream(x: torch.Tensor, linear: Linear, out: torch.Tensor, *, add: bool) -> None:
    tile = tuning.dense(x.shape[0])
    num_rows, depth = linear.weight.shape
    _small_kernel[(triton.cdiv(num_rows, tile.rows),)](
        x,
        linear.weight,
        linear.weight if linear.bias is None else linear.bias,
        out,
        x.shape[0],
        num_rows,
        depth,
        HAS_BIAS=linear.bias is not None,
        ADD=add,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        DEPTH=min(tile.depth, triton.next_power_of_2(depth)),
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )


def product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """x [T, K] in the weight's dtype -> [T, N] in the same; cuBLAS."""
    if linear.bias is None:
        return x @ linear.weight.t()
    return torch.addmm(linear.bias, x, linear.weight.t())


def project_add(x: torch.Tensor, linear: Linear, residual: torch.Tensor) -> torch.Tensor:
    """residual [T, N] float32 += x [T, K] weight^T + bias; returns residual."""
    x = x.to(linear.weight.dtype)
    if 0 < x.shape[0] <= tuning.SMALL_TOKENS:
        _stream(x, linear, residual, add=True)
        return residual
    return residual.add_(product(x, linear))


def project_float32(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """x [T, K] in the weight's dtype -> x weight^T + bias [T, N] float32, rounded once at most."""
    if 0 < x.shape[0] <= tuning.SMALL_TOKENS:
        out = torch.empty(x.shape[0], linear.weight.shape[0], dtype=torch.float32, device=x.device)
        _stream(x, linear, out, add=False)
        return out
    return product(x, linear).float()
