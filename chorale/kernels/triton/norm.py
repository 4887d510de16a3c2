"""RMS norm over rows: the residual stream to what the matrix products read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.triton.launch import dependent, wait_for_previous


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
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    x = tl.load(x_ptr + row * H + columns, mask=inside, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
    normed = x * scale * tl.load(norm_ptr + columns, mask=inside, other=0.0)
    tl.store(out_ptr + token * H + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [*, H] float32 -> [T, H] in ``dtype``: of the rows at ``index`` [T] int64, or of all."""
    tokens, hidden = x.shape[0] if index is None else index.shape[0], x.shape[1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=x.device)
    if tokens == 0:
        return out
    _norm_kernel[(tokens,)](
        x,
        x if index is None else index,
        norm,
        out,
        eps,
        hidden,
        INDEXED=index is not None,
        BLOCK=triton.next_power_of_2(hidden),
        num_warps=8,
        **dependent(x),
    )
    return out
