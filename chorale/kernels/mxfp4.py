"""MXFP4 (OCP microscaling, e2m1 with e8m0 scales) in plain torch: decode, and encode to the nearest.

A block is 32 weights along the contraction dimension: 16 bytes, two weights a byte, the first in the low
nibble; and one scale byte ``s`` that multiplies the block by 2^(s - 127). 255 means NaN.

``decode`` looks bytes up in a table of 256 pairs. Measured alternatives are in ``docs/kernels.md``.
"""

from __future__ import annotations

import functools

import torch

GROUP = 32
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_LARGEST = 6.0
_BIAS = 127


@functools.cache
def _pair_table(dtype: torch.dtype) -> torch.Tensor:
    """[256, 2]: the two weights of each byte value."""
    values = torch.tensor(FP4_VALUES, dtype=torch.float32)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).to(dtype)


@functools.cache
def _scale_table(dtype: torch.dtype) -> torch.Tensor:
    """[256]: 2^(s - 127). Both ends fit bfloat16 and float32 (2^-127 as a subnormal)."""
    table = torch.exp2(torch.arange(256, dtype=torch.float64) - _BIAS)
    table[255] = torch.nan
    return table.to(dtype)


def decode(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., G, 16] uint8 and [..., G] uint8 -> [..., G * 32] in ``dtype``; exact in bfloat16 and float32.

    (Products of a 3-bit mantissa and a power of two: only over- and underflow of the dtype could round.)
    """
    pairs = _pair_table(dtype)
    # One gather moves both weights of a byte: the table's rows are viewed as single wider integers.
    wide = torch.int32 if dtype.itemsize == 2 else torch.int64
    values = pairs.view(wide).view(256).index_select(0, blocks.reshape(-1).int())
    groups = values.view(dtype).view(-1, GROUP)
    groups.mul_(_scale_table(dtype).index_select(0, scales.reshape(-1).int()).unsqueeze(1))
    return groups.view(*blocks.shape[:-2], blocks.shape[-2] * GROUP)


def encode(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., K] floats, K a multiple of 32 -> (blocks [..., K / 32, 16], scales [..., K / 32]), both uint8.

    The scale is the smallest power of two that brings the block's largest magnitude to 6 or below, so
    nothing is clipped; each weight then goes to the nearest of the 16 values (ties to the even code).
    """
    groups = weights.float().unflatten(-1, (-1, GROUP))  # [..., G, 32]
    largest = groups.abs().amax(dim=-1)
    exponent = torch.ceil(torch.log2(largest / _LARGEST)).clamp(-_BIAS, _BIAS)
    exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent))
    scaled = groups / torch.exp2(exponent).unsqueeze(-1)
    codes = _nearest_code(scaled)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks, (exponent + _BIAS).to(torch.uint8)


def _nearest_code(values: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 of the nearest e2m1 values. Midpoints go to the code with an even mantissa bit."""
    positive = torch.tensor(FP4_VALUES[:8])
    midpoints = (positive[1:] + positive[:-1]) / 2
    magnitude = values.abs()
    below = torch.bucketize(magnitude, midpoints, right=False)  # midpoint itself counts as below
    above = torch.bucketize(magnitude, midpoints, right=True)
    code = torch.where(below % 2 == 0, below, above)
    return (code + 8 * torch.signbit(values)).to(torch.uint8)
