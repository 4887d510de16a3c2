"""MXFP4 against its definition, one weight at a time, and encode against a search of all codes."""

from __future__ import annotations

import math

import pytest
import torch

from chorale.kernels import mxfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def by_definition(blocks: torch.Tensor, scales: torch.Tensor) -> list[float]:
    """One block: sign, magnitude, scale, spelled out."""
    out = []
    for byte in blocks.tolist():
        for nibble in (byte & 15, byte >> 4):
            sign = -1.0 if nibble & 8 else 1.0
            out.append(sign * E2M1[nibble & 7] * math.ldexp(1.0, int(scales) - 127))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [3, 100, 120, 127, 130, 250])
def test_decode_is_the_definition(dtype: torch.dtype, scale: int) -> None:
    """All 256 bytes; exact in both dtypes."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scales = torch.full((1, 16), scale, dtype=torch.uint8)
    expected = [by_definition(blocks[0, g], scales[0, g]) for g in range(16)]
    actual = mxfp4.dequantize(blocks, scales, dtype)
    assert actual.dtype == dtype
    assert actual.shape == (1, 512)
    assert torch.equal(actual.float(), torch.tensor(expected).view(1, 512))


def test_scale_255_is_nan_and_0_is_tiny() -> None:
    blocks = torch.full((1, 1, 16), 0x22, dtype=torch.uint8)  # all 1.0
    assert mxfp4.dequantize(blocks, torch.tensor([[255]], dtype=torch.uint8), torch.float32).isnan().all()
    tiny = mxfp4.dequantize(blocks, torch.tensor([[0]], dtype=torch.uint8), torch.float32)
    assert torch.equal(tiny, torch.full((1, 32), 2.0**-127))


def test_encode_inverts_decode() -> None:
    """A block that uses the largest code comes back bit for bit (its scale is then determined)."""
    blocks = torch.randint(0, 256, (40, 3, 16), dtype=torch.uint8)
    blocks[..., 0] = 0x77
    blocks[blocks & 0x0F == 0x08] ^= 0x08  # minus zero keeps its sign, but write plus zero to keep it simple
    blocks[blocks & 0xF0 == 0x80] ^= 0x80
    scales = torch.randint(60, 200, (40, 3), dtype=torch.uint8)
    again = mxfp4.quantize(mxfp4.dequantize(blocks, scales, torch.float32))
    assert torch.equal(again[0], blocks)
    assert torch.equal(again[1], scales)


def test_encode_takes_the_nearest_value_and_clips_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(64, 96, generator=generator) * torch.logspace(-6, 6, 64).unsqueeze(1)
    blocks, scales = mxfp4.quantize(weights)
    decoded = mxfp4.dequantize(blocks, scales, torch.float32)
    unit = torch.exp2(scales.float() - 127).repeat_interleave(32, dim=-1)
    candidates = torch.tensor(E2M1 + [-value for value in E2M1])
    best = (weights.unsqueeze(-1) - candidates * unit.unsqueeze(-1)).abs().amin(-1)
    assert torch.equal((weights - decoded).abs(), best)
    assert (weights.abs() <= 6 * unit * (1 + 1e-6)).all()


def test_encode_of_zeros_and_ties() -> None:
    blocks, scales = mxfp4.quantize(torch.zeros(1, 32))
    assert torch.equal(mxfp4.dequantize(blocks, scales, torch.float32), torch.zeros(1, 32))
    row = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 4)
    decoded = mxfp4.dequantize(*mxfp4.quantize(row), torch.float32)
    # Ties go to the value with an even mantissa bit, as IEEE rounding does.
    assert decoded[:8].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
