"""Each reference op against its definition, written as loops over tokens, heads and experts."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from chorale.errors import ConfigError
from chorale.kernels import mxfp4, select_ops
from chorale.kernels.cpu.library import library
from chorale.kernels.ops import AttentionMeta, AttentionShape, ExpertTensors, QkvWeights, RouterWeights
from chorale.kernels.reference import attention as paged
from chorale.kernels.reference import moe as reference_moe
from chorale.kernels.reference import ops as reference

FREED = -(10**6)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ choosing


def test_select_ops() -> None:
    assert select_ops("auto", "cpu").name == ("reference" if library().functions is None else "cpu")
    assert select_ops("reference", "cpu").name == "reference"
    assert select_ops("reference", "cuda").name == "reference"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_forced_back_end_that_cannot_run_is_an_error(device: str) -> None:
    with pytest.raises(ConfigError, match="triton"):
        select_ops("triton", device)
    with pytest.raises(ConfigError, match="cutlass"):
        select_ops("cutlass", device)


def test_importing_kernels_imports_no_torch() -> None:
    code = "import chorale.kernels, chorale.kernels.ops, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ------------------------------------------------------------------ attention

SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=10, sliding_window=128)


def attend_by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, position: int, window: int | None
) -> torch.Tensor:
    """One query [Nq, D] at ``position`` over keys [Nkv, L, D]: sums, spelled out, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[0] // k.shape[0]
    for head in range(q.shape[0]):
        visible = [p for p in range(position + 1) if window is None or position - p < window]
        scores = [
            float(q[head].double() @ k[head // group, p].double()) / math.sqrt(q.shape[1]) for p in visible
        ]
        mass = [math.exp(score) for score in scores]
        total = sum(mass) + math.exp(float(sinks[head]))
        for weight, p in zip(mass, visible, strict=True):
            out[head] += weight / total * v[head // group, p].double()
    return out.view(-1)


class Pool:
    """Contiguous sequences written into shuffled blocks; everything else is NaN."""

    def __init__(self, block_size: int, dtype: torch.dtype = torch.float32) -> None:
        self.size = block_size
        self.kv = torch.full((1500, 2, SHAPE.num_kv_heads, block_size, SHAPE.head_dim), torch.nan).to(dtype)
        self.free = torch.randperm(1500, generator=torch.Generator().manual_seed(1)).tolist()

    def add(self, k: torch.Tensor, v: torch.Tensor, first: int) -> list[int]:
        """Blocks of one row; those wholly before position ``first`` are freed."""
        length = k.shape[1]
        table = []
        for block in range(-(-length // self.size)):
            begin, end = block * self.size, min((block + 1) * self.size, length)
            if end <= first:
                table.append(FREED)
                continue
            table.append(self.free.pop())
            self.kv[table[-1], 0, :, : end - begin] = k[:, begin:end].to(self.kv.dtype)
            self.kv[table[-1], 1, :, : end - begin] = v[:, begin:end].to(self.kv.dtype)
        return table


ROWS = {
    "decodes": [(1, 1), (127, 1), (128, 1), (129, 1), (300, 1), (17, 1)],
    "one-decode": [(200, 1)],
    "prefill": [(130, 130)],
    "chunk": [(400, 90)],
    "mixed": [(129, 1), (64, 1), (1, 1), (290, 3), (128, 128), (129, 2), (310, 60)],
}


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize(
    ("kind", "block_size"), [*((kind, 16) for kind in ROWS), ("mixed", 1), ("mixed", 64)]
)
def test_attention(kind: str, block_size: int, group: int) -> None:
    """rows: (context, new tokens). Checked at each row's first and last queries."""
    window = SHAPE.sliding_window if group else None
    pool, tables, keys, values = Pool(block_size), [], [], []
    rows = ROWS[kind]
    for i, (context, new) in enumerate(rows):
        keys.append(randn(SHAPE.num_kv_heads, context, SHAPE.head_dim, seed=i))
        values.append(randn(SHAPE.num_kv_heads, context, SHAPE.head_dim, seed=100 + i))
        tables.append(
            pool.add(keys[-1], values[-1], max(0, context - new - SHAPE.sliding_window + 1) if group else 0)
        )
    width = max(map(len, tables)) + 2
    table = torch.tensor([t + [FREED] * (width - len(t)) for t in tables], dtype=torch.int32)
    starts = torch.tensor([0] + [new for _, new in rows]).cumsum(0)
    total = int(starts[-1])
    meta = AttentionMeta(
        positions=torch.cat([torch.arange(context - new, context) for context, new in rows]),
        query_start=starts.int(),
        context_lens=torch.tensor([context for context, _ in rows], dtype=torch.int32),
        block_tables=(table, table),
        slots=(torch.zeros(total, dtype=torch.int64),) * 2,
        max_query_len=max(new for _, new in rows),
        max_context_len=max(context for context, _ in rows),
    )
    # The other group's plan is made, too, and may not look where this one may: give it blocks it may read.
    full = torch.where(table < 0, 0, table)
    tables_of = (full, table) if group else (table, table)
    plan = paged.plan_attention(
        AttentionMeta(**{**{f: getattr(meta, f) for f in meta.__slots__}, "block_tables": tables_of}),
        SHAPE,
        block_size,
    )
    q, sinks = randn(total, SHAPE.num_heads, SHAPE.head_dim, seed=7), randn(SHAPE.num_heads, seed=8)
    out = paged.attention(q, pool.kv, sinks, plan, group)
    assert out.shape == (total, SHAPE.num_heads * SHAPE.head_dim)
    for i, (context, new) in enumerate(rows):
        for offset in {0, new // 2, new - 1}:
            token = int(starts[i]) + offset
            position = context - new + offset
            expected = attend_by_definition(q[token], keys[i], values[i], sinks, position, window)
            # float32 sums of at most 400 terms of order one
            torch.testing.assert_close(out[token].double(), expected, rtol=1e-5, atol=1e-5)


def test_long_prefill_needs_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries go in chunks: a limit of 2,000 scores gives the same answer as one product."""
    k, v = randn(2, 200, 10, seed=1), randn(2, 200, 10, seed=2)
    pool = Pool(16)
    table = torch.tensor([pool.add(k, v, 0)], dtype=torch.int32)
    meta = AttentionMeta(
        positions=torch.arange(200),
        query_start=torch.tensor([0, 200], dtype=torch.int32),
        context_lens=torch.tensor([200], dtype=torch.int32),
        block_tables=(table, table),
        slots=(torch.zeros(200, dtype=torch.int64),) * 2,
        max_query_len=200,
        max_context_len=200,
    )
    q, sinks = randn(200, 6, 10), randn(6)
    plan = paged.plan_attention(meta, SHAPE, 16)
    whole = [paged.attention(q, pool.kv, sinks, plan, group) for group in (0, 1)]
    monkeypatch.setattr(paged, "_MAX_SCORES", 2000)
    for group in (0, 1):
        torch.testing.assert_close(paged.attention(q, pool.kv, sinks, plan, group), whole[group])


def test_memory_limit_of_batched_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    for limit in (2**24, 1):
        monkeypatch.setattr(paged, "_MAX_GATHER", limit)
        table = torch.arange(40, dtype=torch.int32).view(8, 5)
        meta = AttentionMeta(
            positions=torch.full((8,), 70),
            query_start=torch.arange(9, dtype=torch.int32),
            context_lens=torch.full((8,), 71, dtype=torch.int32),
            block_tables=(table, table),
            slots=(torch.zeros(8, dtype=torch.int64),) * 2,
            max_query_len=1,
            max_context_len=71,
        )
        planned.append(paged.plan_attention(meta, SHAPE, 16))
    assert [len(plan.decodes[0]) for plan in planned] == [1, 8]
    kv, q, sinks = randn(40, 2, 2, 16, 10), randn(8, 6, 10), randn(6)
    torch.testing.assert_close(
        paged.attention(q, kv, sinks, planned[0], 0), paged.attention(q, kv, sinks, planned[1], 0)
    )


# ------------------------------------------------------------------ qkv and rotary


def test_qkv_rope_cache() -> None:
    """Norm, product, bias, rotation of q and k, and where k and v land."""
    hidden, tokens, size = 12, 5, 4
    heads = SHAPE.num_heads + 2 * SHAPE.num_kv_heads
    weight, bias, norm = randn(heads * 10, hidden, seed=1), randn(heads * 10, seed=2), randn(hidden, seed=3)
    x, rope = randn(tokens, hidden, seed=4), randn(tokens, 10, seed=5)
    slots = torch.tensor([3, 4, 17, 0, 9])
    meta = AttentionMeta(
        positions=torch.arange(5),
        query_start=torch.tensor([0, 5], dtype=torch.int32),
        context_lens=torch.tensor([5], dtype=torch.int32),
        block_tables=(torch.zeros(1, 2, dtype=torch.int32),) * 2,
        slots=(slots, slots),
        max_query_len=5,
        max_context_len=5,
    )
    plan = paged.plan_attention(meta, SHAPE, size)
    kv = torch.zeros(6, 2, 2, size, 10)
    before = x.clone()
    weights = QkvWeights(norm, reference.pack_linear(weight, bias))
    q = reference.qkv_rope_cache(x, None, weights, 1e-5, rope, plan, 0, kv)
    assert torch.equal(x, before)
    ahead, again = reference.rms_norm(x, norm, 1e-5), torch.zeros_like(kv)
    unread = torch.full_like(x, torch.nan)
    assert torch.equal(reference.qkv_rope_cache(unread, ahead, weights, 1e-5, rope, plan, 0, again), q)
    assert torch.equal(again, kv)
    written = set()
    for token in range(tokens):
        normed = x[token] / (x[token].pow(2).mean() + 1e-5).sqrt() * norm
        out = (weight @ normed + bias).view(heads, 10)
        cos, sin = rope[token, :5], rope[token, 5:]
        rotated = torch.cat((out[:, :5] * cos - out[:, 5:] * sin, out[:, 5:] * cos + out[:, :5] * sin), -1)
        torch.testing.assert_close(q[token], rotated[:6])
        block, cell = divmod(int(slots[token]), size)
        torch.testing.assert_close(kv[block, 0, :, cell], rotated[6:8])
        torch.testing.assert_close(kv[block, 1, :, cell], out[8:])
        written.add((block, cell))
    for block in range(6):
        for cell in range(size):
            assert bool(kv[block, :, :, cell].any()) == ((block, cell) in written)


# ------------------------------------------------------------------ experts


def test_route_softmax_is_over_the_chosen_only() -> None:
    x, norm, weight, bias = randn(7, 12), randn(12, seed=1), randn(8, 12, seed=2), randn(8, seed=3)
    weights = RouterWeights(norm, reference.pack_linear(weight, bias), 4)
    normed, ids, gates = reference.route(x, weights, 1e-5)
    for token in range(7):
        logits = weight @ normed[token] + bias
        chosen = sorted(range(8), key=lambda e: -float(logits[e]))[:4]
        assert ids[token].tolist() == chosen
        torch.testing.assert_close(gates[token], torch.softmax(logits[chosen], -1))


def expert_tensors(
    experts: int, dense: bool, dtype: torch.dtype
) -> tuple[ExpertTensors, torch.Tensor, torch.Tensor]:
    """(tensors, W1 [E, 2 I, H], W2 [E, H, I]) with H = 64 and I = 32."""
    up = mxfp4.quantize(randn(experts, 64, 64, seed=1))
    down = mxfp4.quantize(randn(experts, 64, 32, seed=2))
    w1, w2 = mxfp4.dequantize(*up, torch.float32), mxfp4.dequantize(*down, torch.float32)
    given: dict[str, Any] = {
        "gate_up_blocks": up[0],
        "gate_up_scales": up[1],
        "down_blocks": down[0],
        "down_scales": down[1],
    }
    if dense:
        given = {"gate_up": w1.transpose(1, 2), "down": w2.transpose(1, 2)}
    tensors = ExpertTensors(
        gate_up_bias=randn(experts, 64, seed=3),
        down_bias=randn(experts, 64, seed=4),
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        num_layers=1,
        dtype=dtype,
        **given,
    )
    return tensors, w1, w2


@pytest.mark.parametrize("form", ["dense", "decoded", "packed"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 4, 4), (5, 32, 4), (33, 8, 4), (40, 5, 1)])
def test_moe(monkeypatch: pytest.MonkeyPatch, form: str, tokens: int, experts: int, top_k: int) -> None:
    """Some experts get nothing, one gets most; inputs large enough that the clamps bite."""
    monkeypatch.setattr(reference_moe, "DECODED_BUDGET", 0 if form == "packed" else 2**30)
    monkeypatch.setattr(mxfp4, "ROWS_AT_ONCE", 24)  # ragged chunks
    tensors, w1, w2 = expert_tensors(experts, form == "dense", torch.float32)
    packed = reference_moe.pack_experts(tensors)
    assert isinstance(packed, reference_moe.PackedExperts) == (form == "packed")
    normed, x = 3 * randn(tokens, 64, seed=5), randn(tokens, 64, seed=6)
    popular = torch.arange(experts) == 1
    ids = torch.stack(
        [torch.topk(randn(experts, seed=20 + t) + 2 * popular, top_k).indices for t in range(tokens)]
    )
    gates = torch.softmax(randn(tokens, top_k, seed=9), -1)
    expected, clamped = x.double().clone(), 0
    for token in range(tokens):
        for gate, expert in zip(gates[token], ids[token].tolist(), strict=True):
            inner = w1[expert].double() @ normed[token].double() + tensors.gate_up_bias[expert].double()
            values = []
            for g, u in inner.view(-1, 2).tolist():
                clamped += g > 7 or abs(u) > 7
                g, u = min(g, 7.0), max(-7.0, min(u, 7.0))
                values.append(g / (1 + math.exp(-1.702 * g)) * (u + 1))
            result = w2[expert].double() @ torch.tensor(values, dtype=torch.float64)
            expected[token] += float(gate) * (result + tensors.down_bias[expert].double())
    assert clamped > 10
    actual = reference_moe.moe(normed, ids, gates, packed, x)
    # sums of 64 products of order 50: float32 keeps six digits of the largest
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-3)


def test_experts_need_all_their_tensors() -> None:
    tensors, _, _ = expert_tensors(2, False, torch.float32)
    fields = {name: getattr(tensors, name) for name in tensors.__slots__}
    with pytest.raises(ValueError, match="all four MXFP4"):
        reference_moe.pack_experts(ExpertTensors(**{**fields, "down_scales": None}))


def test_lm_head_norms_only_what_is_asked() -> None:
    x, norm, weight = randn(9, 12), randn(12, seed=1), randn(50, 12, seed=2)
    logits = reference.lm_head(x, torch.tensor([8, 0]), norm, reference.pack_head(weight), 1e-5)
    for row, token in enumerate((8, 0)):
        normed = x[token] / (x[token].pow(2).mean() + 1e-5).sqrt() * norm
        torch.testing.assert_close(logits[row], weight @ normed)
