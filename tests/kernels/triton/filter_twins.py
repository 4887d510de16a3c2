"""Filters as the Triton kernels search for them, against the runtime's plain torch. As ``twins.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chorale.kernels.ops import SamplingInputs
from chorale.kernels.reference.sampling.filters import NEGLIGIBLE, filter_scores
from chorale.kernels.triton.sampling.thresholds import BLOCK, BLOCKS, thresholds
from tests.kernels.triton.twins import DEVICE
from tests.support.kernels.filter_answers import ANSWERS, answer_rows

V = BLOCK * BLOCKS + 52  # two pieces
# top_k, top_p, min_p
FILTERS = {
    "k": (20.0, 1.0, 0.0),
    "k 1": (1.0, 1.0, 0.0),
    "p": (float(V), 0.7, 0.0),
    "p tiny": (float(V), 1e-6, 0.0),
    "m": (float(V), 1.0, 0.1),
    "k and p": (50.0, 0.5, 0.0),
    "all": (300.0, 0.9, 0.01),
    "none": (float(V), 1.0, 0.0),
}


def rows_of(cases: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    filters = torch.tensor(list(cases))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(filters), V, generator=generator) * 3
    return logits, filters, torch.rand(len(filters), generator=generator) + 0.5


def kept_by_torch(logits: torch.Tensor, filters: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    scores = logits / temperature.unsqueeze(1)
    scores[:, -1] = -torch.inf  # forbidden
    before = scores.clone()
    columns = filters[:, 0], filters[:, 1], filters[:, 2]
    filter_scores(scores, *columns, most_k=V, space=(torch.empty_like(scores), torch.empty_like(scores)))
    return (scores > NEGLIGIBLE / 2) & before.isfinite()


def edges(logits: torch.Tensor, filters: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    forbidden = torch.zeros(logits.shape[1], dtype=torch.uint8)
    forbidden[-1] = 1
    unused = torch.zeros(0, dtype=torch.int32)
    heat, columns = temperature.to(DEVICE), filters.to(DEVICE)
    return thresholds(
        logits.to(DEVICE), SamplingInputs(unused, heat, unused, columns), forbidden.to(DEVICE)
    ).cpu()


def test_the_same_tokens_are_kept() -> None:
    logits, filters, temperature = rows_of(FILTERS.values())
    edge = edges(logits, filters, temperature)
    expected = kept_by_torch(logits, filters, temperature)
    scores = logits / temperature.unsqueeze(1)
    scores[:, -1] = -torch.inf
    kept = (scores >= edge.unsqueeze(1) - 1e-6 * edge.abs().clamp(max=1e3).unsqueeze(1)) & scores.isfinite()
    for row, name in enumerate(FILTERS):
        # Sums of thousands of terms in another order may move the edge by a token at most.
        assert int((kept[row] != expected[row]).sum()) <= (1 if "p" in name else 0), name
    assert edge[list(FILTERS).index("none")] == -torch.inf
    assert kept[0].sum() == 20
    assert kept[1].sum() == 1


def test_the_known_tokens_are_kept_in_vllms_order() -> None:
    logits, filters, left = answer_rows(BLOCK)
    edge = edges(logits, filters, torch.ones(len(left)))
    for row, expected in enumerate(left):
        assert set((logits[row] >= edge[row]).nonzero()[:, 0].tolist()) == expected, ANSWERS[row]


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_batch() -> None:
    logits, filters, temperature = rows_of(FILTERS.values())
    together = edges(logits, filters, temperature)
    for row in (0, 6):
        some = slice(row, row + 1)
        assert torch.equal(edges(logits[some], filters[some], temperature[some]), together[some])


def test_greedy_rows_have_no_threshold() -> None:
    logits, filters, _ = rows_of([FILTERS["all"]] * 2)
    assert edges(logits, filters, torch.tensor([0.0, 1.0]))[0] == -torch.inf
