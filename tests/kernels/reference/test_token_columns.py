"""Sampling from logits of some tokens equals sampling from all logits, of which the others are -inf."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chorale.engine.types import EARLY_STOPS
from chorale.kernels.ops import NO_FINITE_LOGITS, NOTHING_ALLOWED, Allowed, SamplingInputs
from chorale.kernels.reference.sampling.noise import row_keys
from chorale.kernels.reference.sampling.sampling import ReferenceSampler
from chorale.kernels.reference.sampling.shared_sampling import make_shared_sampler

VOCAB, COUNT = 203, 9


def tokens_of(
    masks: frozenset[str], heat: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(found by columns, expected, what both left for the next step)"""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB - 1, generator=generator)[:77].sort().values
    ids[-1] = VOCAB - 1
    some = 3 * torch.randn(COUNT, len(ids), generator=generator)
    some[4, -1] = 20.0
    whole = torch.full((COUNT, VOCAB), -torch.inf).index_copy(1, ids, some)
    keys = torch.from_numpy(row_keys(np.arange(COUNT, dtype=np.uint64), np.arange(COUNT) + seed))
    temperature = torch.full((COUNT,), heat)
    temperature[0] = 0.0
    forbidden = (torch.rand(VOCAB, generator=generator) < 0.1).to(torch.uint8)
    filters = allowed = stops = None
    if "filters" in masks:
        filters = torch.tensor([[20.0, 0.9, 0.01], [VOCAB, 1.0, 0.0], [VOCAB, 0.8, 0.0]]).repeat(3, 1)
    if "grammar" in masks:
        octets = torch.randint(0, 256, (3, VOCAB // 8 + 4), generator=generator, dtype=torch.uint8)
        allowed = Allowed(torch.tensor([0, -1, 1, 2, -1, 0, 1, 1, 2], dtype=torch.int32), octets)
    if "stops" in masks:
        stops = torch.full((COUNT, EARLY_STOPS), -1, dtype=torch.int32)
        order = whole.argsort(1, descending=True)
        stops[1, :3], stops[2, :2] = order[1, :3].int(), torch.tensor([int(order[2, -1]), int(order[2, 0])])
        stops[3, 0], stops[4, 0] = VOCAB + 5, VOCAB - 1
    rows = torch.arange(COUNT, dtype=torch.int32)
    draws = SamplingInputs(keys, temperature, rows, filters, allowed, stops)
    results, lasts = [], []
    for logits, columns in ((some, ids), (whole, None)):
        out, last = torch.full((COUNT,), 99), torch.full((COUNT,), 99)
        ReferenceSampler(forbidden, 4, ids=columns)(logits, draws, last, out)
        results.append(out)
        lasts.append(last)
    return *results, *lasts  # type: ignore[return-value]


@pytest.mark.parametrize("heat", [0.0, 1.0, 0.6])
@pytest.mark.parametrize(
    "masks", [(), ("filters",), ("grammar",), ("stops",), ("filters", "grammar", "stops")], ids=" ".join
)
def test_the_same_tokens(masks: tuple[str, ...], heat: float) -> None:
    for seed in range(10):
        found, expected, last, expected_last = tokens_of(frozenset(masks), heat, seed)
        assert torch.equal(found, expected)
        assert torch.equal(last, expected_last)


def test_rows_without_a_token() -> None:
    ids = torch.tensor([3, 9, 11])
    logits = torch.tensor([[torch.nan, 0.0, 1.0], [0.0, torch.inf, 1.0], [0.0, 1.0, -torch.inf]])
    forbidden = torch.zeros(VOCAB, dtype=torch.uint8)
    forbidden[[3, 9]] = 1
    rows = torch.arange(3, dtype=torch.int32)
    draws = SamplingInputs(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3), rows)
    out, last = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    ReferenceSampler(forbidden, 2, ids=ids)(logits, draws, last, out)
    assert out.tolist() == [NO_FINITE_LOGITS, NO_FINITE_LOGITS, NOTHING_ALLOWED]


def test_a_rank_has_all_columns() -> None:
    """A draft head is whole on every rank, so that nothing is exchanged."""
    sampler = make_shared_sampler(None, torch.zeros(VOCAB, dtype=torch.uint8), 2, ids=torch.tensor([3, 9]))  # type: ignore[arg-type]
    draws = SamplingInputs(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1), torch.zeros(1).int())
    out, last = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    sampler(torch.tensor([[0.0, 1.0]]), draws, last, out)
    assert out.tolist() == [9]
