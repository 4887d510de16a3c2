"""Batches of packed conversations with the positions from which a head drafts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from training.data import Array, BatchShape, draw

COUNTED_FROM = 2 * 10**12  # seeds that no trainer draws


def batch_shape(rows: int, seq_len: int) -> BatchShape:
    """Keeps all learned positions."""
    return BatchShape(rows=rows, seq_len=seq_len, num_learned=rows * seq_len)


def draft_vocabulary(size: int, num_dialogues: int) -> Array:
    """Returns the most frequent tokens of answers, in descending order. Training draws other answers."""
    counts: Counter[int] = Counter()
    for seed in range(COUNTED_FROM, COUNTED_FROM + num_dialogues):
        ids, learn, _ = draw(seed)
        counts.update(ids[np.asarray(learn, bool)].tolist())
    return np.asarray([token for token, _ in counts.most_common(size)], np.int64)


@dataclass(frozen=True, slots=True)
class Anchors:
    """``index`` [B, A]; ``targets`` [B, A, K] the token that each step should draft; ``valid`` [B, A, K]:
    whether the answer is that long, and the draft vocabulary contains all drafts so far."""

    index: torch.Tensor
    targets: torch.Tensor
    valid: torch.Tensor


def learned_positions(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns [B, S] bool: the tokens that the model must produce, from a batch of ``training.data``."""
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
    """``known`` [V] bool: tokens of the draft vocabulary. ``size``: anchors per row and steps K.

    A row with more anchors is sampled, one with fewer padded with invalid ones. An anchor i is followed by a
    token that the target sampled; its first draft is token i + 2.
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
