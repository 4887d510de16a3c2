"""RMS norm over rows of the residual stream, for the input of matrix products: alone, or fused with the
addition to the residual stream before it (the stream is float32, and its traffic dominates the time). The
sums that end the expert layer (``moe/combine.py``) also use ``normed_row``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from chorale.kernels.triton import tuning
from chorale.kernels.triton.launch import dependent, wait_for_previous


@dataclass(frozen=True, slots=True)
class Norm:
    """The RMS norm that a kernel applies to a row after summing it."""

    weight: torch.Tensor  # [H] float32
    eps: float
    dtype: torch.dtype  # type of the result


def sum_ending(
    norm: Norm | None, x: torch.Tensor
) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor, float]]:
    """Returns the norm's output for a kernel that completes a sum x [T, H], and the arguments norm_ptr,
    normed_ptr and eps.

    Without a norm, x is passed for pointers that are not read.
    """
    if norm is None:
        return None, (x, x, 0.0)
    normed = torch.empty(x.shape, dtype=norm.dtype, device=x.device)
    return normed, (norm.weight, normed, norm.eps)


@triton.jit
def in_fours(BLOCK: tl.constexpr):
    """Return 0..BLOCK-1 laid out so that a thread has four numbers of a row, in float32 and in bfloat16.

    By default the compiler gives it eight where possible, and then moves a float32 row to other threads
    through shared memory before writing it. All kernels here use this function, so that kernels with the same
    number of warps add squares in the same order.
    """
    return tl.max_contiguous(tl.arange(0, BLOCK), 4)


@triton.jit
def normed_row(x, norm, eps, H):
    """Return the normed row. x, norm: [BLOCK] float32, zeros past H."""
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)) * norm


@triton.jit
def _norm_kernel(
    x_ptr,  # [*, H] float32
    index_ptr,  # [T] int64, rows of x (if INDEXED)
    norm_ptr,  # [H] float32
    out_ptr,  # [T, H]
    eps,
    H,
    INDEXED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = token
    if INDEXED:
        row = tl.load(index_ptr + token)
    columns = in_fours(BLOCK)
    inside = columns < H
    x = tl.load(x_ptr + row * H + columns, mask=inside, other=0.0)
    normed = normed_row(x, tl.load(norm_ptr + columns, mask=inside, other=0.0), eps, H)
    tl.store(out_ptr + token * H + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [*, H] float32 -> [T, H] in ``dtype``, for the rows at ``index`` [T] int64 or all rows."""
    tokens, hidden = x.shape[0] if index is None else index.shape[0], x.shape[1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=x.device)
    if tokens == 0:
        return out
    _norm_kernel[(tokens,)](
        x, x if index is None else index, norm, out, eps, hidden,
        INDEXED=index is not None, BLOCK=triton.next_power_of_2(hidden), num_warps=8, **dependent(x),
    )  # fmt: skip
    return out


@triton.jit
def _norm_parts_kernel(
    x_ptr,  # [T, P, W] float32
    norm_ptr,  # [P, W] float32
    out_ptr,  # [T, P, W]
    eps,
    W,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(1)
    place = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + part) * W
    columns = in_fours(BLOCK)
    inside = columns < W
    norm = tl.load(norm_ptr + part * W + columns, mask=inside, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + place + columns, mask=inside, other=0.0)
    tl.store(out_ptr + place + columns, normed_row(x, norm, eps, W).to(out_ptr.dtype.element_ty), mask=inside)


def norm_parts(x: torch.Tensor, norms: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x [T, P * W] float32, norms [P, W] -> [T, P * W] in ``dtype``."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if len(x):
        _norm_parts_kernel[(x.shape[0], norms.shape[0])](
            x, norms, out, eps, norms.shape[1], BLOCK=triton.next_power_of_2(norms.shape[1]),
            num_warps=8 if norms.shape[1] <= 4096 else 16, **dependent(x),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["T"])
def _add_norm_kernel(
    x_ptr,  # [T, H] float32, read and written
    y_ptr,  # [SPLITS, T, H], whose sum is added to x
    b_ptr,  # [H], added too (if HAS_BIAS)
    norm_ptr,  # [H] float32
    high_ptr,  # [T, H]: the norm of the sum, rounded
    low_ptr,  # [T, H]: the rounding error (if LOW)
    T,
    eps,
    H,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = in_fours(BLOCK)
    inside = columns < H
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total += tl.load(b_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + columns, mask=inside, other=0.0)
    wait_for_previous(PDL)
    for split in tl.static_range(SPLITS):
        y = tl.load(y_ptr + (split * T + token) * H + columns, mask=inside, other=0.0)
        total += y.to(tl.float32)
    places = token * H + columns
    x = tl.load(x_ptr + places, mask=inside, other=0.0) + total
    tl.store(x_ptr + places, x, mask=inside)
    normed = normed_row(x, norm, eps, H)
    high = normed.to(high_ptr.dtype.element_ty)
    tl.store(high_ptr + places, high, mask=inside)
    if LOW:
        low = (normed - high.to(tl.float32)).to(low_ptr.dtype.element_ty)
        tl.store(low_ptr + places, low, mask=inside)


def add_norm(
    x: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    with_low: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, H] float32 += bias [H] + the sum of y [SPLITS, T, H] -> x's RMS norm [T, H] in ``dtype``.

    With ``with_low``, also returns the rounding error in ``dtype``.
    """
    splits, tokens, hidden = y.shape
    high = torch.empty(tokens, hidden, dtype=dtype, device=x.device)
    low = torch.empty_like(high) if with_low else None
    _add_norm_kernel[(tokens,)](
        x, y, x if bias is None else bias, norm, high, high if low is None else low, tokens, eps, hidden,
        SPLITS=splits, HAS_BIAS=bias is not None, LOW=with_low, BLOCK=triton.next_power_of_2(hidden),
        num_warps=tuning.ADD_NORM_WARPS, **dependent(x),
    )  # fmt: skip
    return high, low
