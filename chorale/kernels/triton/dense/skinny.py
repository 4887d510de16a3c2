"""Dense products of a few tokens (2 to 16): weights are the rows of a ``tl.dot``, tokens its columns.

The contraction is split to fill the device. The next kernel (residual, or bias and rotary) adds the parts, in
float32 and always in the same order. For the output projection ``tuning`` may choose ``skinny_fused.py``,
which takes one kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.triton import tuning
from chorale.kernels.triton.launch import dependent, tuning_of, wait_for_previous
from chorale.kernels.triton.tuning import Tile


@triton.jit(do_not_specialize=["T"])
def _part_kernel(
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
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    tokens, depth = tl.arange(0, TOKENS), tl.arange(0, DEPTH)
    inside, present = rows < N, tokens < T
    each: tl.constexpr = (K + DEPTH * SPLITS - 1) // (DEPTH * SPLITS) * DEPTH
    first = split * each
    weights = w_ptr + rows[:, None].to(tl.int64) * K + depth[None, :]
    inputs = x_ptr + tokens[:, None] * K + depth[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    wait_for_previous(PDL)
    for k in tl.range(first, tl.minimum(first + each, K), DEPTH, num_stages=STAGES):
        some = k + depth < K
        w = tl.load(weights + k, mask=inside[:, None] & some[None, :], other=0.0)
        x = tl.load(inputs + k, mask=present[:, None] & some[None, :], other=0.0)
        if NORM:
            x = x * tl.load(norm_ptr + k + depth, mask=some, other=0.0)[None, :]
        acc = tl.dot(w, tl.trans(x.to(w_ptr.dtype.element_ty)), acc, input_precision="ieee")
    places = part_ptr + (split * T + tokens[None, :]) * N + rows[:, None]
    tl.store(places, acc, mask=inside[:, None] & present[None, :])


@triton.jit(do_not_specialize=["T"])
def _add_kernel(
    part_ptr,  # [SPLITS, T, N] float32
    b_ptr,  # [N]
    residual_ptr,  # [T, N] float32
    T,
    N,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total += tl.load(b_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    for split in tl.static_range(SPLITS):
        total += tl.load(part_ptr + (split * T + token) * N + columns, mask=inside, other=0.0)
    place = residual_ptr + token * N + columns
    tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)


def parts(x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] (times ``norm`` [K]) times weight [N, K] -> addends [SPLITS, T, N] float32. T <= 16."""
    rows, depth = weight.shape
    arch = tuning_of(x.device)
    tile = arch.skinny
    splits = arch.skinny_splits(triton.cdiv(rows, tile.rows), triton.cdiv(depth, tile.depth))
    return _parts(x, weight, norm, tile, splits)


def whole(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [N, K], which has enough rows to fill the device unsplit -> [T, N] float32. T <=
    16."""
    return _parts(x, weight, None, tuning_of(x.device).skinny_head, 1)[0]


def _parts(
    x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor | None, tile: Tile, splits: int
) -> torch.Tensor:
    tokens, (rows, depth) = x.shape[0], weight.shape
    tiles = triton.cdiv(rows, tile.rows)
    out = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
    _part_kernel[(tiles, splits)](
        x, x if norm is None else norm, weight, out, tokens, rows,
        K=depth, NORM=norm is not None, ROWS=tile.rows, TOKENS=tile.tokens, DEPTH=tile.depth,
        SPLITS=splits, STAGES=tile.num_stages, num_warps=tile.num_warps, **dependent(x),
    )  # fmt: skip
    return out


def add_parts(some: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """residual [T, N] float32 += bias + the sum of ``parts``."""
    splits, tokens, rows = some.shape
    block = tuning.ADD_COLUMNS
    _add_kernel[(tokens, triton.cdiv(rows, block))](
        some, some if bias is None else bias, residual, tokens, rows,
        HAS_BIAS=bias is not None, SPLITS=splits, BLOCK=block, num_warps=1, **dependent(residual),
    )  # fmt: skip
    return residual
