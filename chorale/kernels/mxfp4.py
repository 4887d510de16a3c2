"""MXFP4 (OCP microscaling, e2m1 with e8m0 scales) in plain torch: dequantize, multiply, and quantize.

A block is 32 weights along the contraction dimension: 16 bytes with two weights each, the first in the low
nibble; and one scale byte ``s`` that multiplies the block by 2^(s - 127). 255 means NaN.

Dequantizing takes one table look-up per byte: 256 scales x 256 bytes -> the two scaled weights as one wide
integer. On 2 Zen 5 cores, 5760 x 2880 weights in chunks of 256 rows: 4.0 Gweights/s; looking up unscaled
pairs and multiplying by the scale reaches 2.6, and without chunks (each temporary in newly allocated pages)
0.5.
"""

from __future__ import annotations

import functools

import torch

GROUP = 32
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_LARGEST = 6.0
_BIAS = 127
ROWS_AT_ONCE = 256  # with 2880 weights each: 1.5 MB of indices and 1.5 MB of bfloat16 weights


@functools.cache
def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [65536] integers of twice the dtype's width: the two weights of (scale byte, byte)."""
    values = torch.tensor(FP4_VALUES, dtype=torch.float32)
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=1)  # [256, 2]
    scales = torch.exp2(torch.arange(256, dtype=torch.float64) - _BIAS).float()  # 2^-127 is a subnormal
    scales[255] = torch.nan
    table = (scales.view(256, 1, 1) * pairs).to(dtype)
    return table.view(torch.int32 if dtype.itemsize == 2 else torch.int64).view(-1).to(device)


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., G, 16] uint8 and [..., G] uint8 -> [..., G * 32] in ``dtype``; exact in bfloat16 and float32.

    (Products of a 2-bit mantissa and a power of two: only over- and underflow of the dtype could round.)
    """
    index = blocks.int()
    index += (scales.int() << 8).unsqueeze(-1)
    pairs = _table(dtype, blocks.device).index_select(0, index.view(-1))
    return pairs.view(dtype).view(*blocks.shape[:-2], blocks.shape[-2] * GROUP)


def linear(x: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x [n, K], blocks [N, K / 32, 16], scales [N, K / 32], bias [N] -> x W^T + bias [n, N].

    On a CPU in chunks of rows, so that dequantized weights stay in the cache.
    """
    out = torch.empty(x.shape[0], blocks.shape[0], dtype=x.dtype, device=x.device)
    step = ROWS_AT_ONCE if x.device.type == "cpu" else blocks.shape[0]
    for begin in range(0, blocks.shape[0], step):
        rows = slice(begin, begin + step)
        weight = dequantize(blocks[rows], scales[rows], x.dtype)
        out[:, rows] = torch.addmm(bias[rows], x, weight.t())
    return out


def quantize(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., K] floats, K a multiple of 32 -> (blocks [..., K / 32, 16], scales [..., K / 32]), both uint8.

    The scale is the smallest power of two that brings the block's largest magnitude to 6 or below, so nothing
    is clipped; each weight is then rounded to the nearest of the 16 values (ties to the even code).
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
    """Return codes 0..15 of the nearest e2m1 values. Midpoints are rounded to the code with an even mantissa
    bit."""
    positive = torch.tensor(FP4_VALUES[:8], device=values.device)
    midpoints = (positive[1:] + positive[:-1]) / 2
    magnitude = values.abs()
    below = torch.bucketize(magnitude, midpoints, right=False)  # a midpoint counts as below
    above = torch.bucketize(magnitude, midpoints, right=True)
    code = torch.where(below % 2 == 0, below, above)
    return (code + 8 * torch.signbit(values)).to(torch.uint8)
