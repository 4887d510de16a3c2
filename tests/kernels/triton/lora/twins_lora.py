"""``lora_ops`` of the Triton ops against the reference's. Run as ``twins.py``.

Slot 0 has an adapter of everything, slot 1 one of attention with bias, slot 2 one of some experts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorale.kernels.adapters import (
    HEADS,
    WHOLE,
    Adapter,
    AdapterBatch,
    ExpertLowRank,
    LayerAdapter,
    LoraOps,
    LowRank,
    SlotSizes,
)
from chorale.kernels.ops import AttentionShape, ExpertTensors, LayerCache, Ops, QkvWeights, RouterWeights
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.kernels.triton.lora import ops as triton_lora
from chorale.kernels.triton.lora.slots import SlotBatch, TritonSlots
from chorale.kernels.triton.ops import TRITON_OPS
from chorale.kernels.triton.shared_ops import shared_ops
from chorale.model.config_writer import make_config
from chorale.model.lora.share import part_of_rank
from chorale.parallel.communicator import Silent
from chorale.parallel.rank import Rank
from chorale.parallel.shares import Share, make_shares
from tests.kernels.triton.twins import DEVICE, check, each_dtype, expert_tensors, meta_of, randn, route_to

HIDDEN, DIM, EXPERTS, INTER, VOCAB = 160, 16, 7, 96, 100
QUERY, KEY = 6 * DIM, 2 * DIM
SLOTS = [0, -1, 1, 2, 0]  # of five tokens, and again
MODEL = make_config(
    layers=1, experts=EXPERTS, hidden=HIDDEN, inter=INTER, heads=6, kv_heads=2, head_dim=DIM, vocab=VOCAB
)
SHAPE, BOTH = AttentionShape(6, 2, head_dim=DIM, sliding_window=128), (TRITON_OPS, REFERENCE_OPS)


def low_rank(rank: int, depth: int, width: int, seed: int, first: int = 0, *, bias: bool = False) -> LowRank:
    added = randn(width, seed=seed + 2) if bias else None
    return LowRank(
        randn(rank, depth, seed=seed) / depth**0.5, randn(width, rank, seed=seed + 1), added, first
    )


def of_experts(places: tuple[int, ...], rank: int, depth: int, width: int, seed: int) -> ExpertLowRank:
    count = max(places) + 1
    a, b = randn(count, rank, depth, seed=seed) / depth**0.5, randn(count, width, rank, seed=seed + 1) / 3
    return ExpertLowRank(a, b, places)


def adapters() -> tuple[Adapter, ...]:
    every, some = tuple(range(EXPERTS)), (-1, 0, -1, 1, 2, -1, -1)
    whole = LayerAdapter(
        qkv=(low_rank(5, HIDDEN, QUERY, 10), low_rank(3, HIDDEN, KEY, 20, QUERY + KEY)),
        output=low_rank(4, QUERY, HIDDEN, 30),
        router=low_rank(2, HIDDEN, EXPERTS, 40),
        gate_up=of_experts(every, 20, HIDDEN, 2 * INTER, 50),
        down=of_experts(every, 5, INTER, HIDDEN, 60),
    )
    attention = LayerAdapter(
        qkv=(low_rank(16, HIDDEN, KEY, 70, QUERY, bias=True),),
        output=low_rank(1, QUERY, HIDDEN, 80, bias=True),
    )
    unsloth = LayerAdapter(down=of_experts(some, 6, INTER, HIDDEN, 90))
    return (
        Adapter((whole,), low_rank(3, HIDDEN, VOCAB, 100)),
        Adapter((attention,)),
        Adapter((unsloth,)),
    )


def batches(tokens: int, dtype: torch.dtype, share: Share | None = None) -> tuple[SlotBatch, AdapterBatch]:
    """The same adapters for both ops, or their parts for a rank. What a slot does not use is NaN."""
    found = [each.map(lambda tensor: tensor.to(dtype)) for each in adapters()]
    sizes = SlotSizes(4, 20, dtype, 1, HIDDEN, QUERY, KEY, EXPERTS, INTER, VOCAB)
    if share is not None:
        found = [part_of_rank(each, MODEL, share) for each in found]
        own = (len(share.heads) * DIM, len(share.kv_heads) * DIM, EXPERTS, len(share.columns))
        sizes = SlotSizes(4, 20, dtype, 1, HIDDEN, *own, len(share.vocabulary))
    slots = TritonSlots(sizes, torch.device(DEVICE))
    for pairs in slots.pairs.values():
        pairs.a.fill_(torch.nan)
        pairs.b.fill_(torch.nan)
    for number, adapter in enumerate(found):
        slots.write(number, adapter)
    of_tokens = torch.tensor((SLOTS * tokens)[:tokens], dtype=torch.int32, device=DEVICE)
    groups = ((each, (of_tokens == number).nonzero().squeeze(1)) for number, each in enumerate(found))
    groups = tuple((each, rows) for each, rows in groups if len(rows))
    return slots.batch(of_tokens, WHOLE), AdapterBatch(of_tokens.long(), groups)


class Recorder(Silent):
    """Exchanges between ranks of which one runs after another: the last one gets the sums of all."""

    def __init__(self, rank: int, sums: list[torch.Tensor]) -> None:
        super().__init__(rank, 2)
        self.sums = sums

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            return tensor.add_(self.sums.pop(0))
        self.sums.append(tensor.clone())
        return tensor


def both() -> tuple[LoraOps, LoraOps]:
    assert TRITON_OPS.lora is not None
    assert REFERENCE_OPS.lora is not None
    return TRITON_OPS.lora, REFERENCE_OPS.lora


def part_of(tensors: ExpertTensors, columns: range) -> ExpertTensors:
    """The rank's columns of every expert."""
    rows = slice(2 * columns.start, 2 * columns.stop)
    groups = slice(columns.start // 32, columns.stop // 32)
    assert tensors.gate_up_blocks is not None
    assert tensors.gate_up_scales is not None
    assert tensors.down_blocks is not None
    assert tensors.down_scales is not None
    return replace(
        tensors,
        gate_up_bias=tensors.gate_up_bias[:, rows],
        gate_up_blocks=tensors.gate_up_blocks[:, rows],
        gate_up_scales=tensors.gate_up_scales[:, rows],
        down_blocks=tensors.down_blocks[:, :, groups],
        down_scales=tensors.down_scales[:, :, groups],
    )


def plain_rows(tokens: int) -> list[int]:
    return [row for row in range(tokens) if SLOTS[row % len(SLOTS)] < 0]


@each_dtype
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_qkv(tokens: int, dtype: torch.dtype) -> None:
    weight, bias = (randn(10 * DIM, HIDDEN, seed=1) / 12).to(dtype), randn(10 * DIM, seed=2).to(dtype)
    norm, x, rope = 1 + randn(HIDDEN, seed=3) / 4, randn(tokens, HIDDEN, seed=4), randn(tokens, DIM, seed=5)
    cells = torch.randperm(6 * 64, generator=torch.Generator().manual_seed(6))[:tokens].to(DEVICE)
    table = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    meta, results = meta_of([(tokens, tokens)], (table, table), cells), []
    for lora, ops, batch in zip(both(), BOTH, batches(tokens, dtype), strict=True):
        kv = torch.zeros(6, 2, 2, 64, DIM, device=DEVICE, dtype=dtype)
        cache = LayerCache(ops.plan_attention(meta, SHAPE, 64), 1, kv, rope)
        weights = QkvWeights(norm, ops.pack_linear(weight, bias))
        results.append((lora.qkv_rope_cache(x, None, weights, 1e-5, cache, batch, 0), kv))
    (q, kv), (expected_q, expected_kv) = results
    check(q, expected_q, dtype)
    check(kv, expected_kv, dtype)


@each_dtype
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_output_and_router(tokens: int, dtype: torch.dtype) -> None:
    weight, bias = (randn(HIDDEN, QUERY, seed=4) / 9).to(dtype), randn(HIDDEN, seed=5).to(dtype)
    attended, x = randn(tokens, QUERY, seed=6).to(dtype), randn(tokens, HIDDEN, seed=7)
    router, results = (randn(EXPERTS, HIDDEN, seed=8) / HIDDEN**0.5, randn(EXPERTS, seed=9)), []
    for lora, ops, batch in zip(both(), BOTH, batches(tokens, dtype), strict=True):
        weights = RouterWeights(1 + randn(HIDDEN, seed=1) / 4, ops.pack_router(*router, dtype), 4, dtype)
        linear = ops.pack_linear(weight, bias)
        results.append(lora.project_and_route(attended, linear, x.clone(), weights, 1e-5, batch, 0))
    (found, ours), (expected, theirs) = results
    check(found, expected, dtype)
    if dtype == torch.float32:  # a rounded logit may choose another expert
        assert torch.equal(ours.expert_ids, theirs.expert_ids)
        check(ours.gates, theirs.gates, dtype)


@each_dtype
@pytest.mark.parametrize("lone", [0, 512], ids=["sorted", "lone"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts(tokens: int, lone: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_lora, "LONE_PAIRS", lone)
    torch.manual_seed(tokens)
    ids = torch.stack([torch.randperm(EXPERTS)[:4] for _ in range(tokens)]).to(DEVICE)
    tensors = replace(expert_tensors(EXPERTS, HIDDEN, INTER, dtype), swiglu_limit=7.0)
    routed, x = route_to(ids, randn(tokens, HIDDEN, seed=5).to(dtype)), randn(tokens, HIDDEN, seed=6)
    results = []
    for lora, ops, batch in zip(both(), BOTH, batches(tokens, dtype), strict=True):
        packed = ops.pack_experts(tensors)
        results.append(lora.moe(routed, packed, x.clone(), None, 1e-5, batch, 0)[0])
    plain = TRITON_OPS.moe(routed, TRITON_OPS.pack_experts(tensors), x.clone(), None, 1e-5)[0]
    check(results[0] - x, results[1] - x, dtype)
    assert torch.equal(results[0][plain_rows(tokens)], plain[plain_rows(tokens)])


@each_dtype
def test_replaced_heads(dtype: torch.dtype) -> None:
    """Of two slots, one of which no token has; other rows keep their bits."""
    weight, norm, x = randn(VOCAB, HIDDEN, seed=1).to(dtype), 1 + randn(HIDDEN, seed=3) / 4, randn(5, HIDDEN)
    own = randn(VOCAB, HIDDEN, seed=9).to(dtype)
    batch, _ = batches(5, dtype)
    for slot, head in ((1, own), (3, weight)):
        batch.adapters.write(slot, Adapter((LayerAdapter(),), head))
    index, ops = torch.tensor([4, 1, 2], device=DEVICE), TRITON_OPS
    given = index, norm, ops.pack_head(weight), 1e-5
    found = both()[0].lm_head(x, *given, replace(batch, reach=HEADS))
    expected = both()[0].lm_head(x, *given, batch)
    expected[2] = ops.lm_head(x, index, norm, ops.pack_head(own), 1e-5)[2]
    check(found, expected, dtype)
    assert torch.equal(found[:2], expected[:2])


@each_dtype
def test_head(dtype: torch.dtype) -> None:
    weight, norm, x = randn(VOCAB, HIDDEN, seed=1).to(dtype), 1 + randn(HIDDEN, seed=3) / 4, randn(5, HIDDEN)
    index, results = torch.tensor([4, 1, 2], device=DEVICE), []
    for lora, ops, batch in zip(both(), BOTH, batches(5, dtype), strict=True):
        results.append(lora.lm_head(x, index, norm, ops.pack_head(weight), 1e-5, batch))
    check(results[0], results[1], dtype)
    assert torch.equal(
        results[0][1], TRITON_OPS.lm_head(x, index, norm, TRITON_OPS.pack_head(weight), 1e-5)[1]
    )


@each_dtype
@pytest.mark.parametrize("tokens", [1, 12])
def test_ranks_have_the_sums_of_one(tokens: int, dtype: torch.dtype) -> None:
    """Each of two ranks has its heads and columns of the weights and of the adapters."""
    torch.manual_seed(tokens)
    weight, bias = (randn(HIDDEN, QUERY, seed=4) / 9).to(dtype), randn(HIDDEN, seed=5).to(dtype)
    attended, x = randn(tokens, QUERY, seed=6).to(dtype), randn(tokens, HIDDEN, seed=7)
    router = (randn(EXPERTS, HIDDEN, seed=8) / HIDDEN**0.5, randn(EXPERTS, seed=9))
    tensors = expert_tensors(EXPERTS, HIDDEN, INTER, dtype)
    ids = torch.stack([torch.randperm(EXPERTS)[:4] for _ in range(tokens)]).to(DEVICE)
    routed = route_to(ids, randn(tokens, HIDDEN, seed=5).to(dtype))

    def results(ops: Ops, batch: SlotBatch | AdapterBatch, share: Share | None) -> list[torch.Tensor]:
        own, cut, some, is_first = weight, tensors, attended, share is None or share.is_first
        if share is not None:
            inputs = slice(share.heads.start * DIM, share.heads.stop * DIM)
            own, some, cut = own[:, inputs], some[:, inputs].contiguous(), part_of(tensors, share.columns)
        weights = RouterWeights(1 + randn(HIDDEN, seed=1) / 4, ops.pack_router(*router, dtype), 4, dtype)
        linear = ops.pack_linear(own, bias if is_first else None)
        cut = cut if is_first else replace(cut, down_bias=torch.zeros_like(cut.down_bias))
        assert ops.lora is not None
        new, found = ops.lora.project_and_route(some, linear, x.clone(), weights, 1e-5, batch, 0)
        summed = ops.lora.moe(routed, ops.pack_experts(cut), x.clone(), None, 1e-5, batch, 0)[0]
        return [new, summed, found.expert_ids]

    sums: list[torch.Tensor] = []
    for share in make_shares(MODEL, 2)[::-1]:
        found = results(
            shared_ops(Rank(share, Recorder(share.rank, sums))), batches(tokens, dtype, share)[0], share
        )
    expected = results(REFERENCE_OPS, batches(tokens, dtype)[1], None)
    assert not sums
    check(found[0] - x, expected[0] - x, dtype)
    check(found[1] - x, expected[1] - x, dtype)
    if dtype == torch.float32:
        assert torch.equal(found[2], expected[2])
