"""Rotary tables of draft heads, whose configuration is separate from the target's."""

from __future__ import annotations

import math

import torch

from chorale.model.config import RopeConfig
from chorale.model.draft.config import Llama3Rope
from chorale.model.rope import angle_table, rope_table


def head_rope_table(rope: RopeConfig | Llama3Rope, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return [num_positions, D] float32: D/2 cosines, then D/2 sines."""
    if isinstance(rope, RopeConfig):
        return rope_table(rope, head_dim, num_positions)
    return angle_table(_llama3_frequencies(rope, head_dim), num_positions)


def _llama3_frequencies(rope: Llama3Rope, head_dim: int) -> torch.Tensor:
    """Return radians per position of the D/2 pairs, float32.

    A pair with at most ``low_freq_factor`` turns within the original context is slowed; one with at least
    ``high_freq_factor`` turns is not.
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    turns = rope.original_max_position * plain / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return plain * kept + plain / rope.factor * (1.0 - kept)
