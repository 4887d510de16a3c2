"""Filters with known answers: the tokens that min_p, then top_k, then top_p keep of one small distribution.

Each answer is worked out by hand. Another order of the filters, or a top_p of the unfiltered mass, keeps
another number of tokens in at least one row.
"""

from __future__ import annotations

import torch

PROBABILITIES = (0.30, 0.20, 0.15, 0.10, 0.08, 0.06, 0.05, 0.03, 0.02, 0.01)
OFF = 1e6
# top_k, top_p, min_p, and how many of the likeliest tokens are left
ANSWERS: list[tuple[float, float, float, int]] = [
    (OFF, 1.0, 0.18, 6),  # 0.18 * 0.30 = 0.054
    (OFF, 0.8, 0.0, 5),  # 0.75 is too little
    (OFF, 0.8, 0.18, 4),  # 0.8 * 0.89 = 0.712
    (8.0, 0.8, 0.18, 4),  # top_k keeps what min_p has left
    (8.0, 0.8, 0.0, 5),  # 0.8 * 0.97 = 0.776
    (3.0, 0.75, 0.0, 2),  # 0.75 * 0.65 = 0.4875; top_p first would leave 3
    (3.0, 0.75, 0.6, 2),  # min_p leaves 2: 0.75 * 0.5 = 0.375
    (3.0, 0.55, 0.6, 1),  # 0.55 * 0.5 = 0.275; of 0.65 it would be 0.3575
    (2.0, 1.0, 0.18, 2),
]


def answer_rows(vocab: int) -> tuple[torch.Tensor, torch.Tensor, list[set[int]]]:
    """Return logits [N, vocab], filters [N, 3] and each row's set of tokens that are left."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.full((len(ANSWERS), vocab), -60.0)
    left = []
    for row, (*_, count) in enumerate(ANSWERS):
        tokens = torch.randperm(vocab - 1, generator=generator)[: len(PROBABILITIES)]
        logits[row, tokens] = torch.tensor(PROBABILITIES, dtype=torch.float64).log().float()
        left.append(set(tokens[:count].tolist()))
    filters = torch.tensor([[min(k, vocab), p, m] for k, p, m, _ in ANSWERS])
    return logits, filters, left
