"""Experts with random weights, and what their layer adds by its definition."""

from __future__ import annotations

import torch

from chorale.kernels import mxfp4
from chorale.kernels.ops import ExpertTensors


def make_experts(experts: int, hidden: int, inter: int, seed: int = 0) -> ExpertTensors:
    torch.manual_seed(seed)

    def octets(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8)

    return ExpertTensors(
        gate_up_bias=torch.randn(experts, 2 * inter), down_bias=torch.randn(experts, hidden),
        swiglu_limit=7.0, swiglu_alpha=1.702, num_layers=1, dtype=torch.float32,
        gate_up_blocks=octets(0, 256, experts, 2 * inter, hidden // 32, 16),
        gate_up_scales=octets(118, 124, experts, 2 * inter, hidden // 32),
        down_blocks=octets(0, 256, experts, hidden, inter // 32, 16),
        down_scales=octets(118, 124, experts, hidden, inter // 32),
    )  # fmt: skip


def decoded(tensors: ExpertTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """(W1 [E, 2 I, H], W2 [E, H, I])"""
    packed = (
        (tensors.gate_up_blocks, tensors.gate_up_scales), (tensors.down_blocks, tensors.down_scales)
    )  # fmt: skip
    up, down = (
        mxfp4.dequantize(blocks, scales, torch.float32)
        for blocks, scales in packed
        if blocks is not None and scales is not None
    )
    return up, down


def expected_sum(
    tensors: ExpertTensors, normed: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """In float64, token by token and expert by expert."""
    up, down = (each.double() for each in decoded(tensors))
    limit, alpha = tensors.swiglu_limit, tensors.swiglu_alpha
    out = torch.zeros(normed.shape, dtype=torch.float64)
    for token in range(len(normed)):
        for expert, gate in zip(ids[token].tolist(), gates[token].tolist(), strict=True):
            both = up[expert] @ normed[token].double() + tensors.gate_up_bias[expert]
            rise, linear = both[::2].clamp(max=limit), both[1::2].clamp(-limit, limit)
            inner = rise * torch.sigmoid(alpha * rise) * (linear + 1)
            out[token] += gate * (down[expert] @ inner + tensors.down_bias[expert])
    return out
