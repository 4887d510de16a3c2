"""Batches of packed conversations with the positions from which a head drafts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from training.data import Array, BatchShape, draw

COUNTED_FROM = 2 * 10**12  # seeds that no trainer draws


def batch_shape(rows: int, seq_len: int) -> BatchShape:
    """All learned positions are kept."""
    return BatchShape(rows=rows, seq_len=seq_len, num_learned=rows * seq_len)


def draft_vocabulary(size: int, num_dialogues: int) -> Array:
    """The tokens that answers use most, the most frequent first. Training draws other conversations."""
    counts: Counter[int] = Counter()
    for seed in range(COUNTED_FROM, COUNTED_FROM + num_dialogues):
        ids, learn, _ = draw(seed)
        counts.update(ids[np.asarray(learn, bool)].tolist())
    return np.asarray([token for token, _ in counts.most_common(size)], np.int64)


@dataclass(frozen=True, slots=True)
class Anchors:
    """``index`` [B, A]; ``targets`` [B, A, K] the token that each step should draft; ``valid`` [B, A, K]:
    whether an answer goes on up to it, and the draft vocabulary has all drafts so far."""

    index: torch.Tensor
    targets: torch.Tensor
    valid: torch.Tensor


def learned_positions(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[B, S] bool: tokens that the model must say, from a batch of ``training.data``."""
    learned = torch.zeros(batch["token_ids"].shape, dtype=torch.bool, device=batch["token_ids"].device)
    learned.view(-1)[batch["predict"][batch["weight"] > 0] + 1] = True
    return learned


def find_anchors(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    learned: torch.Tensor,
    known: torch.Tensor,
    size: tuple[int, int],
) -> Anchors:
    """``known`` [V] bool: tokens of the draft vocabulary. ``size``: anchors a row (drawn, if a row has more;
    padded with invalid ones, if it has fewer) and steps K.

    An anchor i is followed by a token that the target sampled; its first draft is token i + 2.
    """
    num_anchors, steps = size

    def ahead(values: torch.Tensor, by: int) -> torch.Tensor:
        return torch.cat((values[:, by:], torch.zeros_like(values[:, :by])), dim=1)

    valid, so_far = [], ahead(learned, 1) & (ahead(positions, 1) == positions + 1)
    for step in range(steps):
        by = step + 2
        so_far = so_far & ahead(learned & known[token_ids], by) & (ahead(positions, by) == positions + by)
        valid.append(so_far)
    order = (torch.rand(valid[0].shape, device=learned.device) + valid[0]).argsort(dim=1, descending=True)
    order = order[:, :num_anchors]
    rows = torch.arange(len(order), device=order.device).unsqueeze(1)
    targets = torch.stack([ahead(token_ids, step + 2)[rows, order] for step in range(steps)], dim=-1)
    return Anchors(order, targets, torch.stack([one[rows, order] for one in valid], dim=-1))
