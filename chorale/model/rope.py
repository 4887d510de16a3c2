"""The rotary table: YaRN's frequencies, and the angles of all positions."""

from __future__ import annotations

import math

import torch

from chorale.model.config import RopeConfig


def yarn_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return radians per position of the D/2 pairs, [D / 2] float32 (YaRN, "NTK by parts").

    Pairs that turn more than ``beta_fast`` times within the original context keep their frequency, those that
    turn less than ``beta_slow`` times are slowed by ``factor``, and a linear ramp lies in between. gpt-oss
    does not truncate the ends of that ramp to whole dimensions.
    """
    half = head_dim // 2
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.factor <= 1.0:
        return plain

    def dimension_of(turns: float) -> float:
        period = rope.original_max_position / (turns * 2 * math.pi)
        return half * math.log(period) / math.log(rope.theta)

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    ramp = (torch.arange(half, dtype=torch.float32) - low) / max(high - low, 1e-3)
    slowed = ramp.clamp(0.0, 1.0)  # 0: unchanged, 1: slowed by the whole factor
    return plain * (1.0 - slowed) + plain / rope.factor * slowed


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return [num_positions, D] float32: D/2 cosines, then D/2 sines, times the YaRN concentration.

    Angles are float32 products of float32 frequencies, as in training: at position 100,000 the float64 angle
    of the fastest pair differs by up to 4e-3 radians.
    """
    return angle_table(yarn_frequencies(rope, head_dim), num_positions).mul_(rope.concentration)


def angle_table(frequencies: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Return [num_positions, D] float32: cosines, then sines, of ``frequencies`` [D / 2], radians per
    position."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
