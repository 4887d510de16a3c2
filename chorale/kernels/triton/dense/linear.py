"""Dense products. For one token, kernels stream the weights once, without tensor cores. ``skinny.py`` is for
a few tokens, cuBLAS for more.

There are two streaming kernels. If rows fit in registers (output projection), a program has all its weights
in flight before it waits for its input. For many rows (the head), a loop keeps several tiles in flight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense import skinny_fused
from chorale.kernels.triton.dense.compact import Linear as Linear
from chorale.kernels.triton.dense.skinny import add_parts, parts, whole
from chorale.kernels.triton.launch import dependent, is_amd, is_nvidia, wait_for_previous
from chorale.kernels.triton.tuning import Tile


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Pack ``weight`` [N, K] in the checkpoint's layout: programs stream its rows."""
    return Linear(weight.contiguous(), bias if bias is None else bias.contiguous())


def pack_head(weight: torch.Tensor) -> Linear:
    return pack_linear(weight, None)


@triton.jit
def load_rows(w_ptr, rows, inside, k, K, CHUNK: tl.constexpr):
    """Load columns k..k+CHUNK-1 of some rows of a matrix [*, K], as [ROWS, CHUNK]; zeros outside."""
    depth = k + tl.arange(0, CHUNK)
    places = w_ptr + rows[:, None].to(tl.int64) * K + depth[None, :]
    mask = inside[:, None] & (depth < K)[None, :]
    return tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_part(x_ptr, k, K, CHUNK: tl.constexpr):
    """Load elements k..k+CHUNK-1 of a vector of K as float32; zeros outside."""
    depth = k + tl.arange(0, CHUNK)
    return tl.load(x_ptr + depth, mask=depth < K, other=0.0).to(tl.float32)


@triton.jit
def _resident_kernel(
    x_ptr,  # [K]
    w_ptr,  # [N, K], in x's dtype
    b_ptr,  # [N]
    out_ptr,  # [N] float32
    N,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,  # out += instead of out =
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,  # at least K / 4
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    quarters: tl.constexpr = (K + CHUNK - 1) // CHUNK
    w: tl.tuple = ()
    for n in tl.static_range(quarters):
        w += (load_rows(w_ptr, rows, inside, n * CHUNK, K, CHUNK),)
    if HAS_BIAS:
        bias = tl.load(b_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL, LAUNCH_DEPENDENTS=False)
    x: tl.tuple = ()
    for n in tl.static_range(quarters):
        x += (load_part(x_ptr, n * CHUNK, K, CHUNK),)  # all loads are in flight before the first is used
    if ADD:
        before = tl.load(out_ptr + rows, mask=inside, other=0.0)
    products = w[0].to(tl.float32) * x[0][None, :]
    for n in tl.static_range(1, quarters):
        products += w[n].to(tl.float32) * x[n][None, :]
    total = tl.sum(products, 1)
    if HAS_BIAS:
        total += bias
    if ADD:
        total += before
    tl.store(out_ptr + rows, total, mask=inside)


@triton.jit
def _gemv_kernel(
    x_ptr,  # [K]
    w_ptr,  # [N, K], in x's dtype
    out_ptr,  # [N] float32
    N,
    K,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    ADD: tl.constexpr = False,  # out += instead of out =
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    inside = rows < N
    weights = w_ptr + rows[:, None].to(tl.int64) * K + depth[None, :]
    wait_for_previous(PDL, LAUNCH_DEPENDENTS=False)
    products = tl.zeros((ROWS, DEPTH), tl.float32)
    for k in tl.range(0, K, DEPTH, num_stages=STAGES):
        some = k + depth < K
        w = tl.load(weights + k, mask=inside[:, None] & some[None, :], other=0.0)
        x = tl.load(x_ptr + k + depth, mask=some, other=0.0)
        products += w.to(tl.float32) * x.to(tl.float32)[None, :]
    if ADD:
        before = tl.load(out_ptr + rows, mask=inside, other=0.0)
        tl.store(out_ptr + rows, before + tl.sum(products, 1), mask=inside)
    else:
        tl.store(out_ptr + rows, tl.sum(products, 1), mask=inside)


def product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """Multiply with cuBLAS: x [T, K] in the weight's dtype -> [T, N] in the same dtype."""
    if linear.bias is None:
        return x @ linear.weight.t()
    return torch.addmm(linear.bias, x, linear.weight.t())


def chunk_of(depth: int) -> int:
    """Returns the columns of a quarter row; the kernels that hold whole rows in registers hold four
    quarters."""
    return int(max(16, triton.next_power_of_2(triton.cdiv(depth, 4))))


def project_add(x: torch.Tensor, linear: Linear, residual: torch.Tensor) -> torch.Tensor:
    """residual [T, N] float32 += x [T, K] weight^T + bias, T <= ``SKINNY_TOKENS``; returns residual."""
    x = x.to(linear.weight.dtype)
    tile = skinny_fused.shape_of(x, linear, tuning.compact_output, tuning.skinny_output)
    if tile is not None:
        return skinny_fused.project(x, linear, residual, tile)
    if x.shape[0] > 1:
        return add_parts(parts(x, linear.weight), linear.bias, residual)
    _project_row(x, linear, residual, add=True)
    return residual


def project_row(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """x [1, K] weight^T + bias -> [1, N] float32."""
    out = torch.empty(1, linear.weight.shape[0], dtype=torch.float32, device=x.device)
    _project_row(x.to(linear.weight.dtype), linear, out, add=False)
    return out


def _project_row(x: torch.Tensor, linear: Linear, out: torch.Tensor, *, add: bool) -> None:
    num_rows, depth = linear.weight.shape
    tile = tuning.OUTPUT_ROW
    _resident_kernel[(triton.cdiv(num_rows, tile.rows),)](
        x, linear.weight, linear.weight if linear.bias is None else linear.bias, out, num_rows,
        K=depth, HAS_BIAS=linear.bias is not None, ADD=add, ROWS=tile.rows, CHUNK=chunk_of(depth),
        num_warps=tile.num_warps, **dependent(x),
    )  # fmt: skip


def float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [N, K], both in one dtype -> [T, N] float32 without intermediate rounding."""
    if is_nvidia(x.device) and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()


def project_head(x: torch.Tensor, head: Linear) -> torch.Tensor:
    """x [T, K] in the weight's dtype -> x weight^T [T, N] float32."""
    weight = head.weight
    tile = skinny_fused.shape_of(x, head, tuning.compact_head)
    if tile is not None:
        return skinny_fused.project(x, head, None, tile)
    if 1 < x.shape[0] <= tuning.SKINNY_TOKENS and x.dtype == torch.bfloat16 and not is_amd(x.device):
        return whole(x, weight)
    if x.shape[0] != 1:
        return float32_product(x, weight)
    return stream_row(x, weight, tuning.HEAD_ROW)


def stream_row(
    x: torch.Tensor, weight: torch.Tensor, tile: Tile, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x [1, K] in the weight's dtype times weight [N, K], for any K -> [1, N] float32, added to ``residual``
    if given."""
    shape = 1, weight.shape[0]
    out = torch.empty(shape, dtype=torch.float32, device=x.device) if residual is None else residual
    adds = {} if residual is None else {"ADD": True}  # without residual, the launch's arguments are unchanged
    _gemv_kernel[(triton.cdiv(weight.shape[0], tile.rows),)](
        x, weight, out, weight.shape[0], weight.shape[1],
        ROWS=tile.rows, DEPTH=min(tile.depth, triton.next_power_of_2(weight.shape[1])),
        STAGES=tile.num_stages, num_warps=tile.num_warps, **adds, **dependent(x),
    )  # fmt: skip
    return out
