"""The expert layer in plain torch: packing, and the sum over the chosen experts.

Experts of a small checkpoint are decoded once, at packing, when all layers together fit in
``DECODED_BUDGET``. Those of a large one stay as they are in the file (MXFP4 views of the mapping, which is
how the 20b fits in 16 GB) and are decoded as they are used: a few hundred rows at a time, only of experts
that some token of the step chose, once a step however many tokens chose them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chorale.errors import ConfigError
from chorale.kernels import mxfp4
from chorale.kernels.ops import ExpertTensors

DECODED_BUDGET = 512 * 2**20  # bytes of decoded expert weights, all layers together


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """Decoded weights, contraction dimension first."""

    gate_up: torch.Tensor  # [E, H, 2 I]
    down: torch.Tensor  # [E, I, H]
    gate_up_bias: torch.Tensor  # [E, 2 I]
    down_bias: torch.Tensor  # [E, H]
    swiglu_limit: float
    swiglu_alpha: float

    def up(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, 2 I]"""
        return torch.addmm(self.gate_up_bias[expert], x, self.gate_up[expert])

    def back(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        """[n, I] -> [n, H]"""
        return torch.addmm(self.down_bias[expert], inner, self.down[expert])


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """MXFP4 weights as in the file."""

    gate_up_blocks: torch.Tensor  # [E, 2 I, H / 32, 16] uint8
    gate_up_scales: torch.Tensor  # [E, 2 I, H / 32] uint8
    down_blocks: torch.Tensor  # [E, H, I / 32, 16] uint8
    down_scales: torch.Tensor  # [E, H, I / 32] uint8
    gate_up_bias: torch.Tensor
    down_bias: torch.Tensor
    swiglu_limit: float
    swiglu_alpha: float

    def up(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, 2 I], decoding as it goes."""
        blocks, scales = self.gate_up_blocks[expert], self.gate_up_scales[expert]
        return mxfp4.linear(x, blocks, scales, self.gate_up_bias[expert])

    def back(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        """[n, I] -> [n, H]"""
        blocks, scales = self.down_blocks[expert], self.down_scales[expert]
        return mxfp4.linear(inner, blocks, scales, self.down_bias[expert])


def pack_experts(tensors: ExpertTensors) -> DenseExperts | PackedExperts:
    if tensors.fp8_activations:
        raise ConfigError("--moe-activation-dtype fp8 needs --ops triton and a Hopper GPU")
    dtype = tensors.dtype
    biases = (tensors.gate_up_bias.to(dtype), tensors.down_bias.to(dtype))
    swiglu = (tensors.swiglu_limit, tensors.swiglu_alpha)
    if tensors.gate_up is not None and tensors.down is not None:
        return DenseExperts(tensors.gate_up.to(dtype), tensors.down.to(dtype), *biases, *swiglu)
    blocks = (tensors.gate_up_blocks, tensors.gate_up_scales, tensors.down_blocks, tensors.down_scales)
    gate_up_blocks, gate_up_scales, down_blocks, down_scales = blocks
    if gate_up_blocks is None or gate_up_scales is None or down_blocks is None or down_scales is None:
        raise ValueError("experts need either all four MXFP4 tensors or both dense ones")
    elements = 2 * (gate_up_blocks.numel() + down_blocks.numel())
    if elements * dtype.itemsize * tensors.num_layers > DECODED_BUDGET:
        return PackedExperts(gate_up_blocks, gate_up_scales, down_blocks, down_scales, *biases, *swiglu)
    gate_up = mxfp4.dequantize(gate_up_blocks, gate_up_scales, dtype).transpose(1, 2).contiguous()
    down = mxfp4.dequantize(down_blocks, down_scales, dtype).transpose(1, 2).contiguous()
    return DenseExperts(gate_up, down, *biases, *swiglu)


def moe(
    normed: torch.Tensor,
    expert_ids: torch.Tensor,
    gates: torch.Tensor,
    experts: DenseExperts | PackedExperts,
    x: torch.Tensor,
) -> torch.Tensor:
    """x + sum over the K chosen experts of gate * expert(normed), added in the order of expert ids.

    normed [T, H], expert_ids [T, K] int64, gates [T, K] float32, x [T, H] float32 (overwritten). An id past
    the last expert adds nothing.
    """
    top_k = expert_ids.shape[1]
    flat = expert_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    tokens = torch.div(order, top_k, rounding_mode="floor")  # [T * K], by expert, then by token
    by_expert = gates.reshape(-1).index_select(0, order).unsqueeze(1)
    inputs = normed.to(experts.gate_up_bias.dtype)
    end = 0
    for expert, count in enumerate(torch.bincount(flat).tolist()[: len(experts.down_bias)]):
        if count == 0:
            continue
        begin, end = end, end + count
        chosen = tokens[begin:end]
        inner = experts.up(expert, inputs.index_select(0, chosen))  # [count, 2 I]
        inner = swiglu(inner, experts.swiglu_limit, experts.swiglu_alpha)  # [count, I]
        result = experts.back(expert, inner)  # [count, H]
        x.index_add_(0, chosen, result * by_expert[begin:end])
    return x


def swiglu(gate_up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """[..., 2 I], columns alternating gate and up -> [..., I]: g sigmoid(alpha g) (u + 1), both clamped."""
    gate = gate_up[..., 0::2].clamp(max=limit)
    up = gate_up[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1.0)
