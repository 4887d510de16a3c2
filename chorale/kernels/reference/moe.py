"""The expert layer in plain torch: packing, and the sum over the chosen experts.

Experts of a small checkpoint are decoded once, at packing, if all layers together fit in ``DECODED_BUDGET``.
Experts of a large checkpoint stay MXFP4 views of the file (so that the 20b fits in 16 GB) and are decoded
when used: a few hundred rows at a time, only for experts that some token of the step chose, once per step for
all their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from chorale.errors import ConfigError
from chorale.kernels import mxfp4
from chorale.kernels.ops import ExpertTensors, Routed

DECODED_BUDGET = 512 * 2**20  # bytes of decoded expert weights of all layers


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
        """[n, H] -> [n, 2 I]; decodes a few rows at a time."""
        blocks, scales = self.gate_up_blocks[expert], self.gate_up_scales[expert]
        return mxfp4.linear(x, blocks, scales, self.gate_up_bias[expert])

    def back(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        """[n, I] -> [n, H]"""
        blocks, scales = self.down_blocks[expert], self.down_scales[expert]
        return mxfp4.linear(inner, blocks, scales, self.down_bias[expert])


@dataclass(frozen=True)
class E4m3Inputs:
    """Experts whose products get inputs in e4m3 with a scale for each row, as a Hopper GPU's can."""

    experts: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.experts, name)

    def up(self, expert: int, x: torch.Tensor) -> Any:
        return self.experts.up(expert, _through_e4m3(x))

    def back(self, expert: int, inner: torch.Tensor) -> Any:
        return self.experts.back(expert, _through_e4m3(inner))


def _through_e4m3(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12).float() / 448
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def pack_experts(tensors: ExpertTensors) -> DenseExperts | PackedExperts:
    if tensors.fp8_activations:
        raise ConfigError("--moe-activation-dtype fp8 needs --ops triton and a Hopper GPU")
    if tensors.gate_up is not None and tensors.down is not None:
        return pack_decoded(tensors)
    dtype, packed = tensors.dtype, _packed(tensors)
    elements = 2 * (packed.gate_up_blocks.numel() + packed.down_blocks.numel())
    if elements * dtype.itemsize * tensors.num_layers > DECODED_BUDGET:
        return packed
    return pack_decoded(tensors)


def pack_decoded(tensors: ExpertTensors) -> DenseExperts:
    """Decodes MXFP4 one expert at a time, on the blocks' device; the weights go to the biases' device."""
    if tensors.fp8_activations:
        raise ConfigError("--moe-activation-dtype fp8 needs --ops triton and a Hopper GPU")
    dtype, gate_up, down = tensors.dtype, tensors.gate_up, tensors.down
    if gate_up is None or down is None:
        packed, device = _packed(tensors), tensors.gate_up_bias.device
        gate_up = _decoded(packed.gate_up_blocks, packed.gate_up_scales, dtype, device)
        down = _decoded(packed.down_blocks, packed.down_scales, dtype, device)
    return DenseExperts(gate_up.to(dtype), down.to(dtype), *_shared_fields(tensors))


def _packed(tensors: ExpertTensors) -> PackedExperts:
    blocks = (tensors.gate_up_blocks, tensors.gate_up_scales, tensors.down_blocks, tensors.down_scales)
    gate_up_blocks, gate_up_scales, down_blocks, down_scales = blocks
    if gate_up_blocks is None or gate_up_scales is None or down_blocks is None or down_scales is None:
        raise ValueError("experts need either all four MXFP4 tensors or both dense ones")
    fields = _shared_fields(tensors)
    return PackedExperts(gate_up_blocks, gate_up_scales, down_blocks, down_scales, *fields)


def _shared_fields(tensors: ExpertTensors) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    biases = (tensors.gate_up_bias.to(tensors.dtype), tensors.down_bias.to(tensors.dtype))
    return *biases, tensors.swiglu_limit, tensors.swiglu_alpha


def _decoded(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[E, N, K / 32, 16] -> [E, K, N]"""
    experts, rows, groups, _ = blocks.shape
    found = torch.empty(experts, groups * mxfp4.GROUP, rows, dtype=dtype, device=device)
    for expert in range(experts):
        found[expert] = mxfp4.dequantize(blocks[expert], scales[expert], dtype).t()
    return found


def moe(routed: Routed, experts: Any, x: torch.Tensor) -> torch.Tensor:
    """Return x + sum over the K chosen experts of gate * expert(normed), added in the order of expert ids.

    x [T, H] float32 is overwritten. Ids past the last expert are ignored. If ``back`` of the experts returns
    the addends of P parts, [P, n, H], x is [P, T, H].
    """
    normed, expert_ids, gates = routed
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
        x.index_add_(-2, chosen, result * by_expert[begin:end])
    return x


def swiglu(gate_up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """[..., 2 I], columns alternating gate and up -> [..., I]: g sigmoid(alpha g) (u + 1), both clamped."""
    gate = gate_up[..., 0::2].clamp(max=limit)
    up = gate_up[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1.0)
