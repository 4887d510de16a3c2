"""Blocks of one byte a value: the Triton ops against the reference and against float32 with rounded K and V.

As ``twins.py``: run through ``test_interpreter.py`` or on a GPU. Both forms of the conversion are tried:
Triton's own, and the one written out for chips that have none. Triton's own way of writing runs on a GPU
alone: the interpreter's float8 conversion loses the carry into the exponent (124 becomes 64; Triton 3.9).
"""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from chorale.kernels.ops import AttentionShape, LayerCache, QkvWeights
from chorale.kernels.reference import ops as reference
from chorale.kernels.triton import kv_elements
from chorale.kernels.triton.ops import TRITON_OPS
from tests.kernels.triton.twins import (
    DEVICE,
    ROWS,
    attention_by_torch,
    attention_case,
    check,
    each_dtype,
    meta_of,
    randn,
)

E4M3 = torch.float8_e4m3fn
NATIVE = kv_elements.converts_e4m3(torch.device(DEVICE))
WRITES = ["bytes", "native"] if NATIVE else ["bytes"]
READS = ["bytes", "native"] if NATIVE or DEVICE == "cpu" else ["bytes"]


@pytest.fixture
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How kernels are given e4m3 blocks."""
    monkeypatch.setattr(kv_elements, "converts_e4m3", lambda device: request.param == "native")
    return str(request.param)


writes = pytest.mark.parametrize("form", WRITES, indirect=True)
reads = pytest.mark.parametrize("form", READS, indirect=True)


@triton.jit
def round_kernel(x_ptr, cell_ptr, back_ptr, COUNT: tl.constexpr):
    places = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    cell = kv_elements.to_kv_element(tl.load(x_ptr + places), cell_ptr.dtype.element_ty)
    tl.store(cell_ptr + places, cell)
    tl.store(back_ptr + places, kv_elements.from_kv_element(cell, tl.float32))


def numbers() -> torch.Tensor:
    """Every e4m3 value, every midpoint of two, the floats next to those, and what does not fit."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = codes[codes.isfinite()].unique()
    points = torch.cat((finite, (finite[1:] + finite[:-1]) / 2, torch.tensor([464.0, 480.0, 512.0, 1e30])))
    points = torch.cat((points, -points))
    around = [torch.nextafter(points, torch.full_like(points, way)) for way in (-math.inf, math.inf)]
    odd = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e-40, -1e-40, 2.0**-10])
    drawn = torch.randn(512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 512)
    found = torch.cat((points, *around, odd, drawn))
    return torch.nn.functional.pad(found, (0, -len(found) % 256))


@writes
def test_conversion_rounds_to_nearest_saturates_and_keeps_nan(form: str) -> None:
    x = numbers().to(DEVICE)
    found = torch.zeros(len(x), dtype=E4M3, device=DEVICE)
    back = torch.zeros_like(x)
    round_kernel[(len(x) // 256,)](x, kv_elements.kernel_view(found), back, COUNT=256)
    expected = x.clamp(-448.0, 448.0).to(E4M3)
    is_nan = x.isnan()
    assert torch.equal(found.view(torch.uint8)[~is_nan], expected.view(torch.uint8)[~is_nan])
    assert torch.equal(found.float()[~is_nan], back[~is_nan])
    assert bool(found.float()[is_nan].isnan().all())
    assert bool(back[is_nan].isnan().all())
    assert not bool(found.float()[~is_nan].isnan().any())


@writes
@each_dtype
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_qkv_writes_rounded_and_saturated_cells(tokens: int, dtype: torch.dtype, form: str) -> None:
    hidden, dim, block = 200, 32, 16
    shape = AttentionShape(6, 2, head_dim=dim, sliding_window=128)
    weight, bias = (randn(10 * dim, hidden, seed=1) / 14).to(dtype), randn(10 * dim, seed=2).to(dtype)
    bias[7 * dim + 1] = 5000.0  # of k, turned with its neighbour
    bias[9 * dim + 2] = -5000.0  # of v
    norm, x, rope = 1 + randn(hidden, seed=3) / 4, randn(tokens, hidden, seed=4), randn(tokens, dim, seed=5)
    slots = torch.randperm(6 * block, generator=torch.Generator().manual_seed(6))[:tokens].to(DEVICE)
    table = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    meta = meta_of([(tokens, tokens)], (table, table), slots)
    results = []
    for ops, cell in ((TRITON_OPS, E4M3), (reference.REFERENCE_OPS, E4M3), (reference.REFERENCE_OPS, dtype)):
        kv = torch.zeros(6, 2, 2, block, dim, device=DEVICE, dtype=cell)
        weights = QkvWeights(norm, ops.pack_linear(weight, bias))
        cache = LayerCache(ops.plan_attention(meta, shape, block), 1, kv, rope)
        q = ops.qkv_rope_cache(x, None, weights, 1e-5, cache)
        results.append((q, kv.float()))
    (q, kv), (expected_q, expected), (_, exact) = results
    check(q, expected_q, dtype)
    assert kv.isfinite().all()
    assert float(kv.max()) == 448.0
    assert float(kv.min()) == -448.0
    assert float(exact.abs().max()) > 1000
    # Both round; where a value is next to a midpoint, one may go up and the other down: a step is 1/8.
    apart = (kv - expected).abs()
    if dtype == torch.float32:
        assert bool((apart <= expected.abs() / 8 + 2.0**-9).all())
    assert float((apart > 0).float().mean()) < (1e-3 if dtype == torch.float32 else 0.15)
    written = exact.abs() > 1e-3
    error = (kv - exact.clamp(-448, 448)).abs()[written] / exact.abs().clamp(max=448)[written]
    assert float(error.median()) < 0.04


@reads
@each_dtype
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("rows", ["one-decode", "mixed"])
def test_attention_reads_what_the_cells_say(
    rows: str, block: int, group: int, dtype: torch.dtype, form: str
) -> None:
    """Against the reference over float32 blocks with the same rounded numbers."""
    heads = (8, 2) if block != 64 else (16, 2)
    shape = AttentionShape(*heads, head_dim=16 if block == 16 else 64, sliding_window=128)
    q, kv, sinks, meta = attention_case(ROWS[rows], block, group, shape, torch.float32)
    kv, q = kv.to(E4M3), q.to(dtype)
    plan = TRITON_OPS.plan_attention(meta, shape, block)
    found = TRITON_OPS.attention(q, sinks, LayerCache(plan, group, kv))
    expected = attention_by_torch(q, kv.float(), sinks, meta, shape, group)
    check(found, expected, dtype)
    same = attention_by_torch(q, kv, sinks, meta, shape, group)
    assert torch.equal(same, expected)  # the reference itself reads e4m3 blocks
