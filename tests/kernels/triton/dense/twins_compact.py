"""Products with compact rows against plain torch, and their packing: ``twins.py`` says how these run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorale.kernels.ops import AttentionShape, LayerCache, QkvWeights
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense import skinny_fused
from chorale.kernels.triton.dense.compact import Linear, pack_compact, pack_rows
from chorale.kernels.triton.dense.linear import project_add, project_head, project_row
from chorale.kernels.triton.moe.router import projected
from chorale.kernels.triton.ops import TRITON_OPS
from tests.kernels.triton.twins import DEVICE, check, meta_of, randn
from tests.support.kernels import skinny_machine

EPS = 1e-5
HEADS, KV_HEADS, BLOCK = 4, 2, 16
SHAPE = AttentionShape(HEADS, KV_HEADS, 64, 1)


def linear_of(rows: int, depth: int, *, has_bias: bool = True) -> Linear:
    """Rows of very different sizes."""
    weight = randn(rows, depth, seed=1) * 10 ** (randn(rows, 1, seed=2) * 2)
    bias = randn(rows, seed=3).bfloat16() if has_bias else None
    linear = Linear(weight.bfloat16(), bias)
    return replace(linear, compact=pack_rows(linear.weight))


def machine() -> None:
    """On a CPU, programs execute the PTX."""
    if DEVICE == "cpu":
        skinny_machine.install()


@pytest.mark.parametrize(("size", "limit"), [(1.0, 1e-6), (1e-3, 1e-6), (1e-6, 1e-4)])
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16])
def test_projection(tokens: int, size: float, limit: float) -> None:
    """Row by row, because the rows' sizes differ; also of small inputs, whose sums are subnormal."""
    machine()
    for has_bias, choose in ((True, tuning.compact_output), (False, tuning.compact_head)):
        linear = linear_of(128, 320, has_bias=has_bias)
        x = (randn(tokens, 320, seed=4) * size).bfloat16()
        exact = x.double() @ linear.weight.double().t()
        terms = x.double().abs() @ linear.weight.double().abs().t()
        if linear.bias is not None:
            exact += linear.bias.double()
            terms += linear.bias.double().abs()
        for residual in (None, randn(tokens, 128, seed=5)):
            tile = skinny_fused.shape_of(x, linear, choose)
            assert tile is not None
            expected = exact if residual is None else exact + residual
            sizes = terms if residual is None else terms + residual.abs()
            found = skinny_fused.project(x, linear, None if residual is None else residual.clone(), tile)
            assert float(((found - expected).abs() / sizes).max()) < limit


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_qkv(tokens: int) -> None:
    machine()
    linear, norm = linear_of((HEADS + 2 * KV_HEADS) * 64, 192), 1 + randn(192, seed=6) / 4
    x, rope = 50 * randn(tokens, 192, seed=7), randn(tokens, 64, seed=8)
    slots = torch.arange(tokens, device=DEVICE) * 3
    meta = meta_of([(tokens, tokens)], (torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),) * 2, slots)
    packed = REFERENCE_OPS.pack_linear(linear.weight.float(), linear.bias.float())  # type: ignore[union-attr]
    expected = torch.zeros(4, 2, KV_HEADS, BLOCK, 64, device=DEVICE)
    cache = LayerCache(REFERENCE_OPS.plan_attention(meta, SHAPE, BLOCK), 0, expected, rope)
    exact = REFERENCE_OPS.qkv_rope_cache(x, None, QkvWeights(norm, packed), EPS, cache)
    found, q = torch.zeros_like(expected).bfloat16(), torch.zeros_like(exact).bfloat16()
    sizes = {"NUM_Q": HEADS, "NUM_KV": KV_HEADS, "D": 64, "KV_BLOCK": BLOCK}
    tile = skinny_fused.shape_of(x, linear, tuning.compact_qkv)
    assert tile is not None
    skinny_fused.qkv(x, norm, linear, EPS, rope, slots, q, found, sizes, tile)
    for head in range(HEADS):
        check(q[:, head], exact[:, head], torch.bfloat16)
    for part in range(2):
        for head in range(KV_HEADS):
            check(found[:, part, head], expected[:, part, head], torch.bfloat16)


def test_heads_of_other_sizes_are_refused() -> None:
    linear, x = linear_of(64, 64), randn(1, 64)
    sizes = {"NUM_Q": 1, "NUM_KV": 1, "D": 32, "KV_BLOCK": BLOCK}
    tile = tuning.SkinnyConfig(1, 2, 4, 1)
    with pytest.raises(ValueError, match="32"):
        skinny_fused.qkv(x, x[0], linear, EPS, x, x, x, x, sizes, tile)


@pytest.mark.skipif(DEVICE != "cuda", reason="compact rows are only made for GPUs that read them")
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 9, 16, 17])
def test_ops_choose_by_the_number_of_tokens(tokens: int) -> None:
    """With the sizes of 20b, the ops of servers, which have compact rows, equal those that have none."""
    plain = TRITON_OPS.pack_linear(randn(2880, 4096, seed=1).bfloat16() / 64, randn(2880, seed=2).bfloat16())
    rare, x, y = pack_compact(plain), randn(tokens, 2880, seed=3), randn(tokens, 4096, seed=4).bfloat16()
    assert rare.compact is not None
    exact = y.double() @ plain.weight.double().t() + plain.bias.double()
    if tokens <= tuning.SKINNY_TOKENS:
        check(project_add(y, rare, x.clone()), x + exact, torch.bfloat16)
    parts, bias = projected(y, rare)
    check(parts.sum(0) + (0 if bias is None else bias), exact, torch.bfloat16)
    if tokens == 1:
        check(project_row(y, rare), exact, torch.float32)
    head = TRITON_OPS.pack_head(randn(6400, 2880, seed=5).bfloat16())
    found = project_head(x.bfloat16(), pack_compact(head))
    exact = x.bfloat16().double() @ head.weight.double().t()
    check(found, exact, torch.float32 if tokens <= tuning.SKINNY_TOKENS else torch.bfloat16)
    assert pack_compact(TRITON_OPS.pack_head(head.weight[:100])).compact is None
    assert pack_compact(TRITON_OPS.pack_head(head.weight.float())).compact is None


def test_weights_near_their_rows_largest_are_exact() -> None:
    """Down to 2^-14 of its power of two; smaller ones are rounded, by 2^-22 of it at most."""
    linear = linear_of(192, 1024)
    weight = linear.weight.float()
    weight[5], weight[6, ::2] = 0, 0
    weight[7] = weight[7] * 1e-30
    weight = weight.bfloat16()
    weight[8, 3] = torch.nan
    rows = pack_rows(weight)
    assert (rows.words.shape, rows.scales.shape) == ((24, 16, 192), (192,))
    found, weight = skinny_machine.unpack_rows(rows), weight.float()
    largest = 2.0 ** weight.abs().amax(1, keepdim=True).clamp(min=2.0**-95).log2().floor()
    is_near = weight.abs() >= largest * 2.0**-14
    near = [row for row in range(192) if row != 8]
    assert torch.equal(found[near][is_near[near]], weight[near][is_near[near]])
    assert float(((found - weight).abs() / largest)[near].max()) <= 2.0**-22
    assert not torch.isfinite(found[8, 3])


def test_slabs_are_packed_as_a_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = randn(320, 128).bfloat16()
    whole = pack_rows(weight)
    monkeypatch.setattr("chorale.kernels.triton.dense.compact._SLAB", 128 * 128)
    slabs = pack_rows(weight)
    assert torch.equal(whole.words, slabs.words)
    assert torch.equal(whole.scales, slabs.scales)
