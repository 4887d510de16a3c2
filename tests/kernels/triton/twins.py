"""The Triton ops against the reference, op by op. Run through ``test_interpreter.py`` or on a GPU.

Not collected by name: on a CPU these need TRITON_INTERPRET=1 before Triton is imported, in a process of
their own. In float32 both sum the same terms in another order. In bfloat16 (GPU only: the interpreter has no
such arithmetic) the matrix products' inputs are rounded to 8 bits on both sides, at different places.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from chorale.kernels import mxfp4
from chorale.kernels.ops import (
    AttentionMeta,
    AttentionShape,
    ExpertTensors,
    LayerCache,
    Ops,
    QkvWeights,
    Routed,
    RouterWeights,
)
from chorale.kernels.reference import attention as paged
from chorale.kernels.reference import moe as reference_moe
from chorale.kernels.reference import ops as reference
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense import skinny
from chorale.kernels.triton.dense.norm import Norm, rms_norm
from chorale.kernels.triton.moe.combine import add_parts
from chorale.kernels.triton.moe.dequant import load_tile
from chorale.kernels.triton.moe.gemv_kernel import _work_of
from chorale.kernels.triton.ops import TRITON_OPS

assert torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
FREED = 10**6  # a block that does not exist: reading it is an error
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """The error's norm over the result's; a NaN fails."""
    found, expected = found.double(), expected.double()
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    assert error < (3e-6 if dtype == torch.float32 else 1e-2), error


def meta_of(
    rows: list[tuple[int, int]], tables: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
) -> AttentionMeta:
    """rows: (context, new tokens)."""
    starts = torch.tensor([0] + [new for _, new in rows], device=DEVICE).cumsum(0)
    return AttentionMeta(
        positions=torch.cat([torch.arange(context - new, context) for context, new in rows]).to(DEVICE),
        query_start=starts.int(),
        context_lens=torch.tensor([context for context, _ in rows], dtype=torch.int32, device=DEVICE),
        block_tables=tables,
        slots=(slots, slots),
        max_query_len=max(new for _, new in rows),
        max_context_len=max(context for context, _ in rows),
    )


# ------------------------------------------------------------------ attention

ROWS = {
    "decodes": [(1, 1), (127, 1), (128, 1), (129, 1), (300, 1), (17, 1), (64, 1), (65, 1)],
    "one-decode": [(200, 1)],
    "prefill": [(130, 130)],
    "chunk": [(400, 90)],
    "two": [(2, 2), (128, 127)],
    "mixed": [(129, 1), (64, 1), (1, 1), (290, 3), (128, 128), (129, 2), (310, 60), (31, 1)],
}


def attention_case(
    rows: list[tuple[int, int]], block: int, group: int, shape: AttentionShape, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMeta]:
    """(q, kv, sinks, meta): shuffled blocks, those that no query sees freed, NaN where nothing is written."""
    blocks = torch.randperm(1500 // block + 40, generator=torch.Generator().manual_seed(3)).tolist()
    kv = torch.full((len(blocks), 2, shape.num_kv_heads, block, shape.head_dim), torch.nan)
    width = max(-(-context // block) for context, _ in rows) + 1
    table = torch.full((len(rows), width), FREED, dtype=torch.int32)
    for row, (context, new) in enumerate(rows):
        lowest = max(0, context - new - shape.sliding_window + 1) if group else 0
        for index in range(lowest // block, -(-context // block)):
            table[row, index] = place = blocks.pop()
            used = min(block, context - index * block)
            kv[place, :, :, :used] = randn(2, shape.num_kv_heads, used, shape.head_dim, seed=place).cpu()
    total = sum(new for _, new in rows)
    table = table.to(DEVICE)
    meta = meta_of(rows, (table, table), torch.zeros(total, dtype=torch.int64, device=DEVICE))
    q = randn(total, shape.num_heads, shape.head_dim, seed=7).to(dtype)
    return q, kv.to(DEVICE, dtype), randn(shape.num_heads, seed=8), meta


def attention_by_torch(
    q: torch.Tensor,
    kv: torch.Tensor,
    sinks: torch.Tensor,
    meta: AttentionMeta,
    shape: AttentionShape,
    group: int,
) -> torch.Tensor:
    """The reference plans both groups, and may not look at the other's freed blocks."""
    safe = torch.where(meta.block_tables[0] == FREED, 0, meta.block_tables[0])
    tables = (safe, meta.block_tables[1]) if group else (meta.block_tables[0],) * 2
    plan = paged.plan_attention(replace(meta, block_tables=tables), shape, kv.shape[3])
    return paged.attention(q.float(), sinks, LayerCache(plan, group, kv))


@each_dtype
@pytest.mark.parametrize(("group", "long"), [(0, 0), (0, 180), (1, 0)])
@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_attention(
    rows: list[tuple[int, int]], block: int, group: int, long: int, dtype: torch.dtype
) -> None:
    """``long``: window of the full group."""
    heads = (8, 2) if block != 64 else (16, 2)
    shape = AttentionShape(*heads, 16 if block == 16 else 64, sliding_window=128, full_window=long)
    q, kv, sinks, meta = attention_case(rows, block, group, shape, dtype)
    plan = TRITON_OPS.plan_attention(meta, shape, block)
    found = TRITON_OPS.attention(q, sinks, LayerCache(plan, group, kv))
    check(found, attention_by_torch(q, kv, sinks, meta, shape, group), dtype)


@pytest.mark.parametrize("window", [0, 1000])
def test_attention_of_a_long_context_in_many_parts(window: int) -> None:
    shape = AttentionShape(8, 2, head_dim=16, sliding_window=128, full_window=window)
    q, kv, sinks, meta = attention_case([(1200, 1), (3, 1)], 16, 0, shape, torch.float32)
    plan = TRITON_OPS.plan_attention(meta, shape, 16)
    assert plan.num_splits > 8
    expected = attention_by_torch(q, kv, sinks, meta, shape, 0)
    check(TRITON_OPS.attention(q, sinks, LayerCache(plan, 0, kv)), expected, torch.float32)


# ------------------------------------------------------------------ qkv, projections, head


@each_dtype
@pytest.mark.parametrize("hidden", [200, 320])  # whole chunks of 32: one kernel for 2 to 8 tokens
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 17, 40])
@pytest.mark.parametrize(("dim", "block"), [(16, 64), (64, 16), (32, 128)])
def test_qkv_rope_cache(tokens: int, dim: int, block: int, dtype: torch.dtype, hidden: int) -> None:
    shape = AttentionShape(6, 2, head_dim=dim, sliding_window=128)
    rows = 10 * dim
    weight, bias = (randn(rows, hidden, seed=1) / 14).to(dtype), randn(rows, seed=2).to(dtype)
    norm, x, rope = 1 + randn(hidden, seed=3) / 4, randn(tokens, hidden, seed=4), randn(tokens, dim, seed=5)
    slots = torch.randperm(6 * block, generator=torch.Generator().manual_seed(6))[:tokens].to(DEVICE)
    table = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    meta = meta_of([(tokens, tokens)], (table, table), slots)
    results = []
    for ops in (TRITON_OPS, reference.REFERENCE_OPS):
        kv = torch.zeros(6, 2, 2, block, dim, device=DEVICE, dtype=dtype)
        weights = QkvWeights(norm, ops.pack_linear(weight, bias))
        cache = LayerCache(ops.plan_attention(meta, shape, block), 1, kv, rope)
        q = ops.qkv_rope_cache(x, None, weights, 1e-5, cache)
        results.append((q, kv))
    (q, kv), (expected_q, expected_kv) = results
    assert torch.equal(kv != 0, expected_kv != 0)
    check(q, expected_q, dtype)
    check(kv, expected_kv, dtype)


@each_dtype
def test_no_tokens(dtype: torch.dtype) -> None:
    """Nothing is read or written: kernels for few tokens take the last one's place for those that are not."""
    hidden, shape = 320, AttentionShape(6, 2, head_dim=64, sliding_window=128)
    none, table = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.zeros(1, 2).int().to(DEVICE)
    plan = TRITON_OPS.plan_attention(meta_of([(5, 0)], (table, table), none), shape, 64)
    packed = TRITON_OPS.pack_linear(randn(640, hidden).to(dtype), randn(640, seed=1).to(dtype))
    output = TRITON_OPS.pack_linear(randn(hidden, 384).to(dtype), None)
    weights, router = QkvWeights(randn(hidden), packed), random_router(TRITON_OPS, 8, hidden, dtype)
    experts = TRITON_OPS.pack_experts(expert_tensors(8, hidden, 96, dtype))
    x, kv = randn(0, hidden), torch.zeros(2, 2, 2, 64, 64, device=DEVICE, dtype=dtype)
    q = TRITON_OPS.qkv_rope_cache(x, None, weights, 1e-5, LayerCache(plan, 0, kv, randn(0, 64)))
    assert (q.shape, q.dtype) == ((0, 6, 64), dtype)
    assert not kv.any()
    x, routed = TRITON_OPS.project_and_route(q.view(0, 384), output, x, router, 1e-5)
    assert routed.normed.dtype == dtype
    assert [each.shape for each in routed] == [(0, hidden), (0, 4), (0, 4)]
    x, ahead = TRITON_OPS.moe(routed, experts, x, weights, 1e-5)
    assert (x.shape, ahead) == ((0, hidden), None)
    logits = TRITON_OPS.lm_head(x, none, weights.norm, TRITON_OPS.pack_head(packed.weight), 1e-5)
    assert logits.shape == (0, 640)


@each_dtype
def test_qkv_of_rows_that_are_normed_already(dtype: torch.dtype) -> None:
    """Nobody reads x then."""
    hidden, tokens, shape = 200, 40, AttentionShape(6, 2, head_dim=32, sliding_window=128)
    packed = TRITON_OPS.pack_linear((randn(320, hidden) / 14).to(dtype), randn(320, seed=2).to(dtype))
    weights, rope = QkvWeights(1 + randn(hidden, seed=3) / 4, packed), randn(tokens, 32, seed=5)
    table = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    meta = meta_of([(tokens, tokens)], (table, table), torch.arange(tokens, device=DEVICE))
    plan, x = TRITON_OPS.plan_attention(meta, shape, 64), randn(tokens, hidden, seed=4)
    normed, results = rms_norm(x, weights.norm, 1e-5, dtype), []
    for given in ((x, None), (torch.full_like(x, torch.nan), normed)):
        kv = torch.zeros(6, 2, 2, 64, 32, device=DEVICE, dtype=dtype)
        cache = LayerCache(plan, 1, kv, rope)
        results.append((TRITON_OPS.qkv_rope_cache(*given, weights, 1e-5, cache), kv))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@each_dtype
@pytest.mark.parametrize("tokens", [1, 3, 16, 17])
def test_head(tokens: int, dtype: torch.dtype) -> None:
    head, norm, x = (randn(515, 136, seed=5) / 12).to(dtype), 1 + randn(136, seed=6) / 4, randn(20, 136)
    index = torch.randperm(20)[:tokens].to(DEVICE)
    found = TRITON_OPS.lm_head(x, index, norm, TRITON_OPS.pack_head(head), 1e-5)
    assert found.dtype == torch.float32
    check(found, reference.lm_head(x, index, norm, reference.pack_head(head), 1e-5), dtype)


ROUTERS = {
    "few": {},
    "many": {"FEW_LOGITS": 0},
    "many, rounded": {"FEW_LOGITS": 0},
    "halves": {"FEW_LOGITS": 0, "ROUTE_HALVES": 1},
}


@pytest.fixture(params=ROUTERS)
def router(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each form of the router at any number of tokens; in halves it is only if experts are in bfloat16."""
    for name, value in ROUTERS[request.param].items():
        monkeypatch.setattr(tuning, name, value)
    return str(request.param)


def random_router(
    ops: Ops, experts: int, hidden: int, dtype: torch.dtype, *, rounded: bool = False
) -> RouterWeights:
    """``rounded``: to bfloat16, as published weights are."""
    weight, bias = randn(experts, hidden, seed=2) / hidden**0.5, randn(experts, seed=3)
    weight = weight.bfloat16().float() if rounded else weight
    norm = 1 + randn(hidden, seed=1) / 4
    return RouterWeights(norm, ops.pack_router(weight, bias, dtype), 4, dtype)


@each_dtype
@pytest.mark.parametrize("experts", [8, 20])
@pytest.mark.parametrize(("hidden", "depth"), [(136, 75), (201, 75), (208, 160)])
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 40])
def test_project_and_route(
    tokens: int, hidden: int, depth: int, experts: int, dtype: torch.dtype, router: str
) -> None:
    """The new x against the reference; the rest against what the reference makes of the new x."""
    weight, bias = (randn(hidden, depth, seed=4) / 9).to(dtype), randn(hidden, seed=5).to(dtype)
    attended, x = randn(tokens, depth, seed=6).to(dtype), randn(tokens, hidden, seed=7)
    rounded = router == "many, rounded"
    computed = torch.bfloat16 if rounded or router == "halves" else dtype
    packed = random_router(TRITON_OPS, experts, hidden, computed, rounded=rounded)
    assert packed.linear.is_bfloat16 == rounded
    found, (normed, ids, gates) = TRITON_OPS.project_and_route(
        attended, TRITON_OPS.pack_linear(weight, bias), x.clone(), packed, 1e-5
    )
    check(found, reference.output_projection(attended, reference.pack_linear(weight, bias), x), dtype)
    theirs = random_router(reference.REFERENCE_OPS, experts, hidden, computed, rounded=rounded)
    expected = reference.route(found, theirs, 1e-5)
    assert normed.dtype == computed
    check(normed, expected[0], computed)
    assert torch.equal(ids, expected[1])
    in_halves = rounded or router == "halves"
    assert float((gates - expected[2]).abs().max()) < (2e-5 if in_halves else 2e-6)


def test_halves_lose_nothing_of_weights_that_were_bfloat16() -> None:
    for weight in (randn(20, 200).bfloat16().float(), randn(20, 200)):
        packed = TRITON_OPS.pack_router(weight, randn(20), torch.bfloat16)
        error = (packed.halves.float().view(2, 20, 200).sum(0) - weight).abs().max()
        assert float(error) < float(weight.abs().max()) * 2**-16
        assert packed.halves[20:].any() == bool((weight != weight.bfloat16().float()).any())
    assert TRITON_OPS.pack_router(weight, randn(20), torch.float32).halves is None


@pytest.mark.parametrize("tokens", [2, 20])
def test_route_of_a_broken_row_names_experts_that_exist(tokens: int, router: str) -> None:
    attended, x = randn(tokens, 75), randn(tokens, 200)
    attended[0, 3] = x[1, 5] = torch.nan
    dtype = torch.bfloat16 if router == "halves" else torch.float32
    found, (normed, ids, gates) = TRITON_OPS.project_and_route(
        attended,
        TRITON_OPS.pack_linear(randn(200, 75), randn(200)),
        x,
        random_router(TRITON_OPS, 8, 200, dtype),
        1e-5,
    )
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 8
    for each in (found, normed, gates):
        broken = each.isnan().any(1)
        assert bool(broken[:2].all())
        assert not bool(broken[2:].any())
    assert bool(gates[:2].isnan().all())


# ------------------------------------------------------------------ experts


def expert_tensors(experts: int, hidden: int, inter: int, dtype: torch.dtype) -> ExpertTensors:
    def draw(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights = randn(experts, rows, columns, seed=seed) / columns**0.5
        blocks, scales = zip(*(mxfp4.quantize(each) for each in weights), strict=True)  # at once: 14 GB
        return torch.stack(blocks), torch.stack(scales)

    gate_up, down = draw(2 * inter, hidden, 1), draw(hidden, inter, 2)
    return ExpertTensors(
        gate_up_bias=randn(experts, 2 * inter, seed=3),
        down_bias=randn(experts, hidden, seed=4),
        swiglu_limit=1.5,  # so that it is met
        swiglu_alpha=1.702,
        num_layers=1,
        dtype=dtype,
        gate_up_blocks=gate_up[0],
        gate_up_scales=gate_up[1],
        down_blocks=down[0],
        down_scales=down[1],
    )


CHOICES: dict[str, Any] = {
    "any": lambda n, e: torch.stack([torch.randperm(e)[:4] for _ in range(n)]),
    "all-the-same": lambda n, e: torch.tensor([[e - 1, 0, 3, 5]]).repeat(n, 1),
    "some-empty": lambda n, e: torch.stack([torch.randperm(e - 2)[:4] for _ in range(n)]),
}


def route_to(ids: torch.Tensor, normed: torch.Tensor) -> Routed:
    """With any gates."""
    return Routed(normed, ids, torch.softmax(randn(*ids.shape, seed=7), -1))


@each_dtype
@pytest.mark.parametrize(
    ("tokens", "choose"),
    [(1, "any"), (3, "any"), (16, "some-empty"), (33, "all-the-same"), (90, "any")],
)
def test_moe(tokens: int, choose: str, dtype: torch.dtype) -> None:
    experts, hidden, inter = 7, 160, 96  # neither a multiple of the packed tile, nor a power of two
    torch.manual_seed(tokens)
    ids = CHOICES[choose](tokens, experts).to(DEVICE)
    tensors = expert_tensors(experts, hidden, inter, dtype)
    routed, x = route_to(ids, randn(tokens, hidden, seed=5)), randn(tokens, hidden, seed=6)
    found = TRITON_OPS.moe(routed, TRITON_OPS.pack_experts(tensors), x.clone(), None, 1e-5)[0]
    expected = reference_moe.moe(routed, reference_moe.pack_experts(tensors), x.clone())
    check(found - x, expected - x, dtype)
    if DEVICE == "cuda":  # the interpreter runs one program after the other: nothing to find out there
        again = TRITON_OPS.moe(routed, TRITON_OPS.pack_experts(tensors), x.clone(), None, 1e-5)[0]
        assert torch.equal(found, again)


def check_norm(
    normed: torch.Tensor, x: torch.Tensor, norm: Norm, *, same_order: bool = DEVICE == "cpu"
) -> None:
    """What the norm's own kernel makes, which is what the reference makes, rounded: bit for bit, where
    squares are added in the same order. On a GPU ``grouped_moe`` has other warps: a last bit may differ."""
    assert normed.dtype == norm.dtype
    alone = rms_norm(x, norm.weight, norm.eps, norm.dtype)
    unit = 2.0**-7 if norm.dtype == torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(normed, alone, rtol=0.0 if same_order else unit, atol=0.0)
    check(normed, reference.rms_norm(x, norm.weight, norm.eps), norm.dtype)


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 40])
def test_moe_norms_for_the_next_layer(tokens: int, dtype: torch.dtype) -> None:
    """x is the same to the bit with and without; the norm is in what the next product computes in, which need
    not be what the experts do."""
    experts, hidden = 7, 160
    torch.manual_seed(tokens)
    ids = CHOICES["any"](tokens, experts).to(DEVICE)
    packed = TRITON_OPS.pack_experts(expert_tensors(experts, hidden, 96, dtype))
    routed, x = route_to(ids, randn(tokens, hidden, seed=5)), randn(tokens, hidden, seed=6)
    norm = 1 + randn(hidden, seed=8) / 4
    alone, ahead = TRITON_OPS.moe(routed, packed, x.clone(), None, 1e-5)
    assert ahead is None
    for other in (torch.float32, torch.bfloat16):
        weights = QkvWeights(norm, TRITON_OPS.pack_linear(randn(32, hidden).to(other), randn(32).to(other)))
        found, ahead = TRITON_OPS.moe(routed, packed, x.clone(), weights, 1e-5)
        assert torch.equal(found, alone)
        assert (ahead is None) == (tokens <= tuning.SKINNY_TOKENS)
        if ahead is not None:
            check_norm(ahead, found, Norm(norm, 1e-5, other))


@pytest.mark.parametrize("hidden", [160, 201])
@pytest.mark.parametrize("each", [1, 4, 20])
def test_parts_are_added_and_normed(hidden: int, each: int) -> None:
    parts, x, weight = randn(19, each, hidden), randn(19, hidden, seed=1), 1 + randn(hidden, seed=2) / 4
    parts[3, 0, 7] = x[5, 0] = torch.nan
    alone = x.clone()
    assert add_parts(parts, alone) is None
    keep = [row for row in range(19) if row not in (3, 5)]
    check(alone[keep], (x.double() + parts.double().sum(1))[keep], torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        norm, found = Norm(weight, 1e-5, dtype), x.clone()
        normed = add_parts(parts, found, norm)
        assert normed is not None
        assert torch.equal(found[keep], alone[keep])
        check_norm(normed[keep], found[keep], norm, same_order=True)
        assert bool(normed[[3, 5]].isnan().all())
        assert found.isnan().sum() == 2


@pytest.mark.skipif(DEVICE != "cuda", reason="their loop is PTX: see test_gemv_ptx.py")
@pytest.mark.parametrize(("hidden", "inter"), [(2880, 128), (64, 2880), (320, 192), (320, 1472), (192, 704)])
@pytest.mark.parametrize(
    ("tokens", "experts"),
    [(n, e) for n in (1, 2, 8, 9, 16, 17, 25) for e in (9, 128)] + [(64, 32), (200, 128)],
)
def test_streamed_moe(
    tokens: int, experts: int, hidden: int, inter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths of which gpt-oss's 45 chunks of 64 are one: in bfloat16 these take the streaming products."""
    from chorale.kernels.triton.moe.gemv import can_use_gemv

    monkeypatch.setattr("chorale.kernels.triton.moe.moe.can_use_grouped", lambda *_: False)
    torch.manual_seed(tokens)
    tensors = expert_tensors(experts, hidden, inter, torch.bfloat16)
    packed, theirs = TRITON_OPS.pack_experts(tensors), reference_moe.pack_experts(tensors)
    normed, x = randn(tokens, hidden, seed=5).bfloat16(), randn(tokens, hidden, seed=6)
    assert can_use_gemv(normed, 4 * tokens, packed)
    for choose in CHOICES.values():
        routed = route_to(choose(tokens, experts).to(DEVICE), normed)
        found = TRITON_OPS.moe(routed, packed, x.clone(), None, 1e-5)[0]
        expected = reference_moe.moe(routed._replace(normed=normed.float()), theirs, x.clone())
        check(found - x, expected - x, torch.bfloat16)
        assert torch.equal(found, TRITON_OPS.moe(routed, packed, x.clone(), None, 1e-5)[0])


@triton.jit
def _work_kernel(
    offsets_ptr, out_ptr, further, E, COLUMNS: tl.constexpr, SORTED: tl.constexpr, EXPERTS: tl.constexpr
):
    program = tl.program_id(0)
    work = _work_of(
        offsets_ptr, offsets_ptr, program, 0, None, further, E, 0, False, SORTED, COLUMNS, EXPERTS
    )
    for part in tl.static_range(3):
        tl.store(out_ptr + program * 3 + part, work[part])


@pytest.mark.parametrize("tokens", [2, 16])
def test_head_of_few_rows(tokens: int) -> None:
    """However small the vocabulary: nothing is left to be added up."""
    x, weight = randn(tokens, 320, seed=1), randn(300, 320, seed=2)
    check(skinny.whole(x, weight).cpu(), x.cpu() @ weight.cpu().t(), torch.float32)


@pytest.mark.parametrize(("columns", "apart"), [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize(
    ("tokens", "experts", "choose"),
    [(17, 9, "any"), (64, 32, "any"), (64, 128, "some-empty"), (40, 9, "all-the-same")],
)
def test_tiles_of_streamed_slots(tokens: int, experts: int, choose: str, columns: int, apart: bool) -> None:
    """Every pair is in one program's work, of one expert; tiles after its first come first, or with it."""
    torch.manual_seed(tokens)
    ids = CHOICES[choose](tokens, experts)
    counts = torch.bincount(ids.reshape(-1), minlength=experts)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    width, further = (8 * columns, 4 * tokens // (8 * columns)) if apart else (4 * tokens, 0)
    out = torch.full((further + experts, 3), -1, dtype=torch.int32, device=DEVICE)
    _work_kernel[(further + experts,)](
        offsets.to(DEVICE),
        out,
        further,
        experts,
        COLUMNS=columns,
        SORTED=True,
        EXPERTS=triton.next_power_of_2(experts),
    )
    seen = torch.full((4 * tokens,), -1)
    for number, (expert, first, last) in enumerate(out.tolist()):
        if first < last:
            assert last - first <= width
            assert bool((seen[first:last] == -1).all())
            seen[first:last] = expert
            assert (first == offsets[expert]) == (number >= further)
    assert torch.equal(seen, torch.repeat_interleave(torch.arange(experts), counts))


@pytest.mark.parametrize("paired", [False, True])
def test_packing_loses_no_bit_and_follows_its_specification(paired: bool) -> None:
    """All bytes with all usable scales, an odd number of chunks, rows to pad."""
    from chorale.kernels.triton.moe import packing

    blocks = torch.arange(256, dtype=torch.uint8).repeat(40 * 6 * 16 // 256).view(1, 40, 6, 16)
    scales = (torch.arange(240) % 128 + 1).to(torch.uint8).view(1, 40, 6)
    packed = packing.pack(blocks.to(DEVICE), scales.to(DEVICE), paired=paired)
    assert packed.blocks.shape == (1, 3, 3, 32, 4)
    exact = mxfp4.dequantize(blocks, scales, torch.float32)[0].double()
    values = torch.zeros(48, 192, dtype=torch.float64)
    table = torch.tensor(mxfp4.FP4_VALUES).double()
    for tile, chunk, lane, j, part in itertools.product(range(3), range(3), range(32), range(4), range(4)):
        (g, t), (q, p) = divmod(lane, 4), divmod(part, 2)
        row = 16 * tile + (2 * g + p if paired else 8 * p + g)
        pair = packing.part_of_word(int(packed.blocks[0, tile, chunk, lane, j]) & 0xFFFFFFFF, part)
        exponent = int(packed.scales[0, tile, chunk, g, t // 2, p]) - 253
        for half in (0, 1):
            bits = pair >> 16 * half
            code = table[bits >> 12 & 8 | bits >> 6 & 7]
            values[row, 64 * chunk + 16 * t + 4 * j + 2 * q + half] = code * 2.0**exponent
    assert torch.equal(values[:40], exact)
    assert not values[40:].any()


@each_dtype
def test_loaded_tiles_are_the_weights(dtype: torch.dtype) -> None:
    from chorale.kernels.triton.moe import packing

    blocks, scales = mxfp4.quantize(randn(1, 40, 160))
    packed = packing.pack(blocks, scales)
    found = torch.full((64, 192), torch.nan, device=DEVICE, dtype=dtype)
    asm = [False, True] if DEVICE == "cuda" and dtype == torch.bfloat16 else [False]
    exact = torch.zeros(64, 192, device=DEVICE, dtype=dtype)
    exact[:40, :160] = mxfp4.dequantize(blocks, scales, dtype)[0]
    order = (torch.arange(192) // 64 * 64 + packing.fragment_columns().repeat(3)).to(DEVICE)
    for way in asm:
        copy_tiles_kernel[(3,)](
            packed.blocks, packed.scales, found, 3, 3, BF16=dtype == torch.bfloat16, ASM=way
        )
        assert torch.equal(found, exact[:, order])


@triton.jit
def copy_tiles_kernel(
    blocks_ptr, scales_ptr, out_ptr, row_tiles, chunks, BF16: tl.constexpr, ASM: tl.constexpr
):
    chunk = tl.program_id(0)
    tile = load_tile(blocks_ptr + chunk * 128, scales_ptr + chunk * 32, row_tiles, chunks, 4, BF16, ASM)
    rows, columns = tl.arange(0, 64), tl.arange(0, 64)
    tl.store(out_ptr + rows[:, None] * 192 + chunk * 64 + columns[None, :], tile)


@pytest.mark.parametrize("pairs", [16, 40, 600, 1200])
@pytest.mark.parametrize("experts", [9, 32])
def test_sort_is_stable(pairs: int, experts: int) -> None:
    from chorale.kernels.triton.moe.sort import sort_pairs

    ids = torch.randint(0, experts - 2, (pairs // 4, 4), generator=torch.Generator().manual_seed(pairs))
    order, offsets = sort_pairs(ids.to(DEVICE), experts)
    assert torch.equal(order.cpu().long(), torch.sort(ids.reshape(-1), stable=True).indices)
    counts = torch.bincount(ids.reshape(-1), minlength=experts)
    assert torch.equal(offsets.cpu().long(), torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))))
