"""The draft head on the Triton ops against the reference: ``twins.py`` says how these run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from chorale.kernels.ops import AttentionMeta, AttentionShape, LayerCache, PairNorms
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.kernels.triton import tuning
from chorale.kernels.triton.dense import skinny_fused
from chorale.kernels.triton.dense.draft import TRITON_DRAFT_OPS
from chorale.kernels.triton.ops import TRITON_OPS
from chorale.model.config import RopeConfig
from chorale.model.draft.config import HeadConfig
from chorale.model.draft.head import DraftHead
from chorale.model.draft.pack import pack_weights
from chorale.model.draft.random_head import random_tensors, random_token_ids
from tests.kernels.triton import twins
from tests.kernels.triton.twins import DEVICE, attention_by_torch, attention_case, check, each_dtype, randn
from tests.support.kernels import skinny_machine

BLOCK = 16
EPS = 1e-5
PLAIN = HeadConfig(
    hidden_size=200,
    target_hidden_size=200,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=215,
    vocab_size=90,
    draft_vocab_size=67,
    aux_boundaries=(1, 2, 4),
    rope=RopeConfig(theta=10000.0, factor=1.0),
)
NORMED = replace(
    PLAIN,
    hidden_size=96,
    target_hidden_size=96,
    intermediate_size=320,
    norm_before_residual=True,
    norm_before_fc=True,
    norm_output=True,
)
BY_STATE = replace(PLAIN, aux_norms=True, norm_output=True)
FINAL = replace(PLAIN, aux_boundaries=())
DEEP = replace(PLAIN, kind="peagle", num_layers=2)
DFLASH = replace(PLAIN, kind="dflash", num_layers=2)

# (context, new tokens) of each row, step by step
STEPS: dict[str, list[list[tuple[int, int]]]] = {
    "chain": [[(19, 19)], [(20, 1)], [(21, 1)]],
    "one": [[(1, 1)], [(2, 1)]],
    "few": [[(3, 3), (40, 40)], [(4, 1), (41, 1)], [(8, 4), (45, 4)]],
    "rows": [[(5, 5), (17, 17), (2, 2), (30, 30)], [(6, 1), (18, 1), (3, 1), (31, 1)]],
}


def meta_of(rows: list[tuple[int, int]]) -> AttentionMeta:
    """Row r's blocks are r, r + 4, r + 8, ..."""
    table = torch.stack([torch.arange(r, 32, 4) for r in range(4)])[: len(rows)].int().to(DEVICE)
    positions = [torch.arange(context - new, context) for context, new in rows]
    places = [table[r].cpu()[p // BLOCK].long() * BLOCK + p % BLOCK for r, p in enumerate(positions)]
    slots = torch.cat(places).to(DEVICE)
    return twins.meta_of(rows, (table, table), slots)


def both(config: HeadConfig, dtype: torch.dtype) -> tuple[DraftHead, DraftHead]:
    tensors = {name: tensor.to(DEVICE) for name, tensor in random_tensors(config).items()}
    tensors |= {"layers.0.self_attn.q_proj.bias": randn(config.num_attention_heads * config.head_dim, seed=5)}
    ids = random_token_ids(config).to(DEVICE)
    triton = pack_weights(config, tensors.get, ids, TRITON_OPS, dtype)
    plain = pack_weights(config, tensors.get, ids, REFERENCE_OPS, torch.float32)
    return DraftHead(config, triton, TRITON_OPS, 64), DraftHead(config, plain, REFERENCE_OPS, 64)


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("config", [NORMED, PLAIN, BY_STATE, FINAL, DEEP])
def test_a_head(
    config: HeadConfig, steps: list[list[tuple[int, int]]], dtype: torch.dtype, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tuning, "RESIDENT_DEPTH", 200)  # so that down is streamed
    ours, plain = both(config, dtype)
    kvs = [torch.zeros(head.kv_shape(32, BLOCK), device=DEVICE) for head in (ours, plain)]
    kvs[0] = kvs[0].to(dtype)
    for number, rows in enumerate(steps):
        meta, tokens = meta_of(rows), sum(new for _, new in rows)
        aux = 3 * randn(tokens, config.aux_width, seed=number)
        ids = torch.arange(tokens, device=DEVICE) * 7 % config.vocab_size
        found, expected = ours.project(aux), plain.project(aux)
        check(found, expected, dtype)
        before = expected.clone()
        x, exact = ours.run(expected, ids, meta, kvs[0]), plain.run(expected, ids, meta, kvs[1])
        assert torch.equal(expected, before), "states were written to"
        check(x, exact, dtype)
        check(ours.next_states(x), plain.next_states(exact), dtype)
        index = torch.tensor(sorted({0, tokens - 1}), device=DEVICE)
        check(ours.logits(x, index), plain.logits(exact, index), dtype)
    check(kvs[0], kvs[1], dtype)


@each_dtype
@pytest.mark.parametrize("rows", [[(5, 1)], [(20, 20), (7, 3)]])
def test_a_block(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """DFlash's keys and values of the target's states, then blocks of three tokens, each a row."""
    found = []
    for head in both(DFLASH, dtype):
        kv = torch.zeros(head.kv_shape(32, BLOCK), dtype=torch.float32 if found else dtype, device=DEVICE)
        aux = 3 * randn(sum(new for _, new in rows), DFLASH.aux_width, seed=1)
        head.read(head.project(aux), meta_of(rows), kv)
        block = meta_of([(context + 3, 3) for context, _ in rows])
        table = block.block_tables[0].repeat_interleave(3, dim=0)
        block = replace(
            block,
            query_start=torch.arange(len(table) + 1, dtype=torch.int32, device=DEVICE),
            context_lens=block.context_lens.repeat_interleave(3),
            block_tables=(table, table),
            max_query_len=1,
        )
        ids = torch.arange(len(table), device=DEVICE) * 7
        found.append((head.run_block(ids, block, kv), kv))
    for ours, theirs in zip(*found, strict=True):
        check(ours, theirs, dtype)


@each_dtype
@pytest.mark.parametrize("tokens", [2, 0, 1, 16, 17, 33])
@pytest.mark.parametrize("hidden", [130, 64])
def test_ops_of_a_head(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    draft, plain = TRITON_DRAFT_OPS, REFERENCE_OPS.draft
    assert plain is not None
    x, inter = randn(tokens, hidden, seed=1), 3 * hidden - 2
    norm = 1 + randn(hidden, seed=2) / 4
    gate, up = ((randn(inter, hidden, seed=n) / 8).to(dtype) for n in (3, 4))
    found = draft.gated_silu(x, norm, draft.pack_gated(gate, up), EPS)
    check(found, plain.gated_silu(x, norm, plain.pack_gated(gate.float(), up.float()), EPS), dtype)
    weight, bias = (randn(inter, 2 * hidden, seed=5) / 8).to(dtype), randn(inter, seed=6).to(dtype)
    wide, norms = randn(tokens, 2 * hidden, seed=7), 1 + randn(2, hidden, seed=8) / 4
    for some in (None, norms):
        for b in (None, bias):
            expected = plain.linear(
                wide, some, EPS, REFERENCE_OPS.pack_linear(weight.float(), None if b is None else b.float())
            )
            check(draft.linear(wide, some, EPS, TRITON_OPS.pack_linear(weight, b)), expected, dtype)
    table, ids = randn(40, hidden, seed=9).to(dtype), torch.arange(tokens, device=DEVICE) * 3 % 40
    for keeps in (False, True):
        pair = PairNorms(norm, norms[1], keeps, dtype)
        for one, other in zip(
            draft.join(table, ids, x, pair, EPS), plain.join(table, ids, x, pair, EPS), strict=True
        ):
            check(one, other, dtype)


@pytest.mark.parametrize("tokens", [3, 1, 8, 13])
def test_one_kernel(tokens: int) -> None:
    """The products of few tokens in bfloat16: PTX, which here a program executes."""
    if DEVICE == "cpu":
        skinny_machine.install()
    tile = tuning.SkinnyConfig(2, 4, 6, 2)
    hidden, inter, heads, dim, block = 96, 40, 4, 32, 16
    x, norm = randn(tokens, hidden, seed=1), 1 + randn(hidden, seed=2) / 4
    gate, up = ((randn(inter, hidden, seed=n) / 8).bfloat16() for n in (3, 4))
    plain = REFERENCE_OPS.draft
    assert plain is not None
    out = torch.zeros(tokens, inter, dtype=torch.bfloat16, device=DEVICE)
    skinny_fused.gated(x, norm, TRITON_DRAFT_OPS.pack_gated(gate, up).weight, out, EPS, tile)
    check(out, plain.gated_silu(x, norm, plain.pack_gated(gate.float(), up.float()), EPS), torch.bfloat16)

    shape = AttentionShape(heads, 2, dim, 1)
    rows = (heads + 4) * dim
    weight, bias = (randn(rows, 2 * hidden, seed=5) / 14).bfloat16(), randn(rows, seed=6).bfloat16()
    normed, rope = randn(tokens, 2 * hidden, seed=7).bfloat16(), randn(tokens, dim, seed=8)
    meta = meta_of([(tokens, tokens)])
    found = torch.zeros(32, 2, 2, block, dim, dtype=torch.bfloat16, device=DEVICE)
    expected = torch.zeros(found.shape, device=DEVICE)
    q = torch.zeros(tokens, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    sizes = {"NUM_Q": heads, "NUM_KV": 2, "D": dim, "KV_BLOCK": block}
    linear = TRITON_OPS.pack_linear(weight, bias)
    skinny_fused.qkv(normed, None, linear, 0.0, rope, meta.slots[0], q, found, sizes, tile)
    packed = REFERENCE_OPS.pack_linear(weight.float(), bias.float())
    plan = REFERENCE_OPS.plan_attention(meta, shape, block)
    exact = plain.qkv_rope_cache(normed.float(), packed, LayerCache(plan, 0, expected, rope))
    check(q, exact, torch.bfloat16)
    check(found, expected, torch.bfloat16)

    for some in (bias, None):
        residual, exact = randn(tokens, rows, seed=9), normed.float() @ weight.float().t()
        exact += residual if some is None else residual + some.float()
        linear = TRITON_OPS.pack_linear(weight, some)
        check(skinny_fused.project(normed, linear, residual, tile), exact, torch.bfloat16)


@pytest.mark.parametrize("splits", [4, 1])
@pytest.mark.parametrize("rows", [[(300, 1), (3, 1)], [(90, 60), (20, 20), (33, 1)]])
def test_attention_without_a_sink(rows: list[tuple[int, int]], splits: int) -> None:
    """A sink of -inf takes no part of the mass: of a context in parts, some of them without keys, or in one,
    and of several queries."""
    shape = AttentionShape(8, 2, head_dim=16, sliding_window=1)
    q, kv, sinks, meta = attention_case(rows, 16, 0, shape, torch.float32)
    sinks = torch.full_like(sinks, -torch.inf)
    plan = replace(TRITON_OPS.plan_attention(meta, shape, 16), num_splits=splits)
    expected = attention_by_torch(q, kv, sinks, meta, shape, 0)
    check(TRITON_OPS.attention(q, sinks, LayerCache(plan, 0, kv)), expected, torch.float32)


def test_rows_of_a_graph_that_are_not_in_use_change_nothing() -> None:
    """Their context may be 0 or their block any that exists; what they give may be NaN."""
    ours, _ = both(PLAIN, torch.float32)
    kv = torch.zeros(ours.kv_shape(32, BLOCK), device=DEVICE)
    states, ids = randn(2, 200), torch.tensor([3, 4], device=DEVICE)
    real = meta_of([(1, 1), (1, 1)])
    padded = replace(real, context_lens=torch.tensor([1, 0], dtype=torch.int32, device=DEVICE))
    expected = ours.run(states, ids, real, kv.clone())
    found = ours.run(states, ids, padded, kv.clone())
    assert torch.equal(found[0], expected[0])
