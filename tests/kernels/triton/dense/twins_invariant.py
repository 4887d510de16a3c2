"""``batch_invariant`` of the Triton ops: results against the reference, and bits in steps of several sizes.

Run like ``../twins.py``. On a CPU all dense products have one tile here: numpy adds the terms of products of
other sizes in another order. ``tests/gpu/invariant/test_invariant.py`` covers the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from chorale.kernels.ops import AttentionMeta, AttentionShape, LayerCache, QkvWeights
from chorale.kernels.reference import ops as reference
from chorale.kernels.triton import tuning
from chorale.kernels.triton.attention.invariant import parts_of
from chorale.kernels.triton.launch import tuning_of
from chorale.kernels.triton.ops import triton_ops
from tests.kernels.triton.twins import (
    DEVICE,
    ROWS,
    attention_by_torch,
    attention_case,
    check,
    expert_tensors,
    meta_of,
    randn,
    random_router,
)

OPS = triton_ops(batch_invariant=True)
SHAPE = AttentionShape(4, 2, head_dim=16, sliding_window=128)
EPS = 1e-5


@pytest.fixture(autouse=True)
def one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        for name in ("_INVARIANT_PRODUCTS", "_INVARIANT_HEAD"):
            monkeypatch.setattr(tuning, name, ((1 << 62, tuning.Tile(64, 64, 128, 4, 2)),))


@pytest.mark.parametrize(("group", "long"), [(0, 0), (0, 180), (1, 0)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_attention(rows: list[tuple[int, int]], group: int, long: int) -> None:
    shape = replace(SHAPE, full_window=long)
    q, kv, sinks, meta = attention_case(rows, 64, group, shape, torch.float32)
    found = OPS.attention(q, sinks, LayerCache(OPS.plan_attention(meta, shape, 64), group, kv))
    check(found, attention_by_torch(q, kv, sinks, meta, shape, group), torch.float32)


@pytest.mark.parametrize(("group", "long"), [(0, 0), (0, 180), (1, 0)])
def test_bits_of_attention(group: int, long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tokens of a prompt, as a chunk, as single rows, and beside another row; parts are joined by
    one program or by a second kernel."""
    length, last = 270, 20
    q, kv, sinks, meta = attention_case([(length, length)], 64, 0, SHAPE, torch.float32)

    def run(rows: Sequence[tuple[int, int]], longest: int) -> torch.Tensor:
        """rows: (context, new tokens), all of the one sequence."""
        table = meta.block_tables[0].expand(len(rows), -1).contiguous()
        step = meta_of(list(rows), (table, table), torch.zeros(0, dtype=torch.int64, device=DEVICE))
        inputs = torch.cat([q[context - new : context] for context, new in rows])
        shape = replace(SHAPE, full_window=long)
        plan = OPS.plan_attention(replace(step, max_context_len=longest), shape, 64)
        return OPS.attention(inputs, sinks, LayerCache(plan, group, kv))

    whole = run([(length, length)], length)[-last:]
    assert torch.equal(run([(length, last)], length), whole)
    assert torch.equal(run([(70, 1), (length, last)], length)[1:], whole)
    assert torch.equal(run([(length, 1)], length), whole[-1:])  # in parts
    single = [(length - n, 1) for n in reversed(range(3))]
    assert torch.equal(run(single, 500), whole[-3:])
    monkeypatch.setattr(tuning, "INVARIANT_BYTES", 0)  # no memory for parts
    assert torch.equal(run([(20, 1), *single], length)[1:], whole[-3:])


def test_parts_cover_every_context() -> None:
    for context in (1, 256, 257, 8192, 8193, 9216, 9217, 131_072):
        count = parts_of(context)
        starts = [part * 256 if part < 32 else 8192 + (part - 32) * 1024 for part in range(count + 1)]
        assert starts[count - 1] < context <= starts[count]


def meta_of_tokens(tokens: int, slots: torch.Tensor) -> AttentionMeta:
    table = torch.zeros(tokens, 1, dtype=torch.int32, device=DEVICE)
    return meta_of([(1, 1)] * tokens, (table, table), slots)


def test_the_head_equals_its_reference() -> None:
    x, norm, index = randn(33, 96), randn(96, seed=7), torch.tensor([32, 0, 5], device=DEVICE)
    found, expected = (
        ops.lm_head(x, index, norm, ops.pack_head(randn(70, 96)), EPS)
        for ops in (OPS, reference.REFERENCE_OPS)
    )
    check(found, expected, torch.float32)


@pytest.mark.slow
def test_bits_of_a_layer() -> None:
    """Without attention: one of the tokens at a time, and some of them, against all of them."""
    hidden, tokens, dtype = 96, 33, torch.float32
    linear = OPS.pack_linear(randn((4 + 2 * 2) * 16, hidden) / 8, randn(128, seed=1))
    output = OPS.pack_linear(randn(hidden, 64, seed=2) / 8, randn(hidden, seed=3))
    qkv, router = QkvWeights(randn(hidden), linear), random_router(OPS, 8, hidden, dtype)
    experts = OPS.pack_experts(expert_tensors(8, hidden, 96, dtype))
    stream, rope = randn(tokens, hidden, seed=4), randn(tokens, 16, seed=5)
    attended, norm, head = randn(tokens, 64, seed=6), randn(hidden, seed=7), OPS.pack_head(randn(70, hidden))

    def run(some: list[int]) -> list[torch.Tensor]:
        index = torch.tensor(some, device=DEVICE)
        kv = torch.zeros(1, 2, 2, 64, 16, device=DEVICE)
        plan = OPS.plan_attention(meta_of_tokens(len(some), index), SHAPE, 64)
        x = stream[index]
        q = OPS.qkv_rope_cache(x, None, qkv, EPS, LayerCache(plan, 0, kv, rope[index]))
        x, routed = OPS.project_and_route(attended[index], output, x, router, EPS)
        x, ahead = OPS.moe(routed, experts, x, qkv, EPS)
        assert ahead is not None
        logits = OPS.lm_head(x, torch.arange(len(some), device=DEVICE), norm, head, EPS)
        cells = kv[0].permute(2, 0, 1, 3)[index]
        return [q, *routed, x.clone(), ahead, logits, cells]

    whole = run(list(range(tokens)))
    for some in ([0], [32], [5, 30], [1, 2, 3, 7, 8, 20, 31]):
        for found, all_of_them in zip(run(some), whole, strict=True):
            assert torch.equal(found, all_of_them[torch.tensor(some, device=DEVICE)])


def test_tiles_fit_shared_memory() -> None:
    arch = tuning_of(torch.device("cpu"))
    for small in (arch, replace(arch, shared=100 * tuning.KIB)):
        for tokens in (1, 17, 40, 200, 900, 5000):
            for out_size in (2, 4):
                tile = small.invariant_product(tokens, 2, out_size, is_head=out_size == 4)
                assert tile.rows % 64 == 0
                assert tile.num_stages * (tile.rows + tile.tokens) * tile.depth * 2 < small.shared
