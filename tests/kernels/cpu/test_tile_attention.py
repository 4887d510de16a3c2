"""Attention of many queries on AMX tiles: against float64, at the number of tokens at which it begins, and
the same bits in any chunk. Cells that no query may see hold NaN."""

from __future__ import annotations

import pytest
import torch

from chorale.kernels.cpu.attention import attention, plan_attention
from chorale.kernels.cpu.library import library
from chorale.kernels.ops import AttentionMeta, AttentionShape, LayerCache, Precision
from tests.kernels.cpu.conftest import Use
from tests.kernels.cpu.test_tiles import relative

FEWEST = 9  # kFewestPositions in native/
DIM = 64


class Case:
    """One sequence over shuffled blocks."""

    def __init__(
        self, context: int, window: int, *, heads: int = 8, kv_heads: int = 2, block: int = 16
    ) -> None:
        torch.manual_seed(context + window)
        self.context, self.window, self.block = context, window, block
        self.shape = AttentionShape(heads, kv_heads, DIM, window or 128)
        self.group = 1 if window else 0
        blocks = -(-context // block)
        self.table = torch.randperm(blocks + 3, dtype=torch.int32)[None, :blocks]
        self.keys, self.values = (torch.randn(context, kv_heads, DIM).bfloat16() for _ in range(2))
        self.kv = torch.full((blocks + 3, 2, kv_heads, block, DIM), torch.nan, dtype=torch.bfloat16)
        for position in range(context):
            number = self.table[0, position // block]
            self.kv[number, 0, :, position % block] = self.keys[position]
            self.kv[number, 1, :, position % block] = self.values[position]
        self.q, self.sinks = torch.randn(context, heads, DIM) * 2, torch.randn(heads)

    def run(self, begin: int, count: int, precision: Precision = "int8") -> torch.Tensor:
        """Queries [begin, begin + count), with no block beyond them or behind the window."""
        end = begin + count
        table = self.table.clone()
        table[:, -(-end // self.block) :] = -(10**6)
        if self.window:
            table[:, : max(0, begin - self.window + 1) // self.block] = -(10**6)
        kv = self.kv.clone()
        for position in range(end, self.context):
            kv[self.table[0, position // self.block], :, :, position % self.block] = torch.nan
        meta = AttentionMeta(
            torch.arange(begin, end), torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32), (table, table),
            (torch.zeros(count, dtype=torch.int64),) * 2, count, end,
        )  # fmt: skip
        plan = plan_attention(meta, self.shape, self.block, precision)
        return attention(self.q[begin:end].contiguous(), self.sinks, LayerCache(plan, self.group, kv))

    def expected(self) -> torch.Tensor:
        """In float64, of all queries."""
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        keys, values = (
            each.double().repeat_interleave(heads // kv_heads, 1) for each in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,khd->hqk", self.q.double(), keys) / DIM**0.5
        distance = torch.arange(self.context)[:, None] - torch.arange(self.context)
        seen = (distance >= 0) & (distance < (self.window or self.context))
        scores = scores.masked_fill(~seen, -torch.inf)
        both = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, self.context, 1)), 2)
        weights = both.softmax(2)[:, :, :-1]
        return torch.einsum("hqk,khd->qhd", weights, values).reshape(self.context, -1)


@pytest.mark.parametrize("window", [0, 1, 33, 127, 128, 129])
@pytest.mark.parametrize("context", [9, 31, 64, 65, 200, 321])
def test_it_is_attention(use: Use, context: int, window: int) -> None:
    """Rounding queries and weights to 8 significant bits costs 0.3 %; one key too many of 300 costs 5 %."""
    case = Case(context, window)
    expected = case.expected()
    found = case.run(0, context)
    assert relative(found, expected) < 0.005
    assert relative(found, expected) > 1e-4  # else the tiles were not used
    later = case.run(context - FEWEST, FEWEST)
    assert torch.equal(later, found[context - FEWEST :])


@pytest.mark.parametrize(("heads", "kv_heads", "block"), [(3, 1, 8), (8, 8, 16), (10, 2, 5), (64, 8, 32)])
def test_it_is_attention_for_any_heads_and_blocks(
    use: Use,
    heads: int,
    kv_heads: int,
    block: int,
) -> None:
    case = Case(150, 40, heads=heads, kv_heads=kv_heads, block=block)
    assert relative(case.run(0, 150), case.expected()) < 0.005


def test_the_same_bits_in_any_chunk(use: Use) -> None:
    """From 9 tokens on; with fewer, those of avx512_vnni, which are the exact ones."""
    for window in (0, 128):
        case = Case(300, window)
        whole = case.run(0, 300)
        for begin, count in ((0, FEWEST), (5, 40), (64, 64), (77, 33), (200, 100)):
            assert torch.equal(case.run(begin, count), whole[begin : begin + count])
        few = case.run(250, FEWEST - 1)
        assert relative(few, case.expected()[250 : 250 + FEWEST - 1]) < 1e-6
        use("avx512_vnni")
        assert torch.equal(few, case.run(250, FEWEST - 1))
        use("amx")


def test_exact_is_not_on_tiles(use: Use) -> None:
    case = Case(100, 0)
    assert relative(case.run(0, 100, "exact"), case.expected()) < 1e-6


def test_a_query_that_is_not_finite_spoils_its_own_head(use: Use) -> None:
    case = Case(100, 0)
    case.q[40, 3, 7], case.q[41, 5, 1] = torch.nan, torch.inf
    found = case.run(0, 100).view(100, 8, DIM)
    spoilt = ~found.isfinite().all(2)
    assert spoilt.nonzero().tolist() == [[40, 3], [41, 5]]


def test_large_scores_and_sinks(use: Use) -> None:
    """Weights that underflow count nothing, and a sink may have nearly all."""
    case = Case(130, 0)
    case.q[:60] *= 40
    case.sinks[0], case.sinks[1] = 60.0, -60.0
    found, expected = case.run(0, 130), case.expected()
    assert found.isfinite().all()
    assert found[60:, :DIM].abs().max() < 1e-12
    assert relative(found[60:], expected[60:]) < 0.005
    # Scores of some hundred, rounded to 8 bits, are off by about one.
    assert relative(found[:60], expected[:60]) < 0.2
    assert library().name == "amx"
