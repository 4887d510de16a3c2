"""Weights in 12 of their 16 bits, for products of few tokens, whose time is that of reading weights.

The weights of a row differ by few powers of two, so four bits of exponent are enough: a weight is the sign,
four bits of exponent and the mantissa of its bfloat16, and each row has a scale. A weight of at least 2^-14
of its row's largest power of two is exact. Smaller ones, 1 or 2 of 10,000, become subnormal: they are rounded
by at most 2^-22 of it.

A bfloat16 whose upper four bits of exponent are zeros is such a weight, so unpacking is masking. The other
bits of three words, which hold a pair of weights each, are a fourth pair. Its sums with inputs below 2^-14
are subnormal: with inputs of 1e-6 they keep 15 bits, still more than the inputs have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from chorale.kernels.triton.launch import capability_of

ROWS, COLUMNS = 64, 64  # sizes of a matrix are multiples of these
BLOCK_BYTES = 768  # a unit of eight rows by 64 columns: 32 times 16 bytes, then 32 times 8
SCALE = 2.0**112  # factor of sums, beside ``CompactRows.scales``
ALL = 0x87FF87FF  # a pair's bits; the other eight bits of a word, turned right by ...
TURNS = (4, 8, 12)
TURNED = (0x07800780, 0x00780078, 0x80078007)  # ... are these bits of the fourth pair
_SLAB = 1 << 24  # weights packed at once, to bound the memory


@dataclass(frozen=True, slots=True)
class CompactRows:
    """A matrix [N, K]. Unit q of 64 rows has rows 4 q + i and 32 + 4 q + i at 2 i and 2 i + 1, i < 4, so that
    a thread gets two rows that rotary turns together in heads of 64."""

    words: torch.Tensor  # [N / 8, K / 64, 192] int32
    scales: torch.Tensor  # [N] float32, powers of two


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x weight^T + bias, in the weight's dtype."""

    weight: torch.Tensor  # [N, K] contiguous
    bias: torch.Tensor | None  # [N]
    compact: CompactRows | None = None  # the same weights, for few tokens


def pack_compact(linear: Linear) -> Linear:
    """``Ops.pack_compact``: returns ``linear`` as it is if no kernel here reads compact rows of it."""
    rows, depth = linear.weight.shape
    fits = linear.weight.dtype == torch.bfloat16 and not rows % ROWS and not depth % COLUMNS
    if not fits or capability_of(linear.weight.device) < 90:
        return linear
    return replace(linear, compact=pack_rows(linear.weight))


def pack_rows(weight: torch.Tensor) -> CompactRows:
    """Pack ``weight`` [N, K] bfloat16, N and K multiples of 64."""
    rows, depth = weight.shape
    words = torch.empty(
        rows // 8, depth // COLUMNS, BLOCK_BYTES // 4, dtype=torch.int32, device=weight.device
    )
    scales = torch.empty(rows, dtype=torch.float32, device=weight.device)
    each = max(1, _SLAB // (ROWS * depth)) * ROWS
    for first in range(0, rows, each):
        some, their_scales = _pack_slab(weight[first : first + each])
        words[first // 8 : (first + each) // 8] = some
        scales[first : first + each] = their_scales
    return CompactRows(words, scales)


def _pack_slab(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = weight.view(torch.int16).int()
    magnitude = bits & 0x7FFF
    largest = (magnitude.amax(1, keepdim=True) >> 7).clamp(32)
    scales = torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest - 127)
    small = torch.ldexp(weight.float().abs(), 148 - largest).round().int()  # in units of 2^-21 of the scale
    magnitude = magnitude - (largest - 15 << 7)
    twelve = torch.where(magnitude >= 128, magnitude, small) | bits & 0x8000
    # [64 rows, half, unit, i] and [chunk, part, t, pair, left and right]
    split = twelve.unflatten(1, (-1, 2, 4, 4, 2)).unflatten(0, (-1, 2, 8, 4))
    each = split.permute(0, 2, 4, 3, 1, 6, 5, 7, 8).flatten(0, 1)  # [unit, chunk, i, half, t, part, pair, 2]
    first, second, third, fourth = (each[..., 0] | each[..., 1] << 16).unbind(-1)
    pairs = torch.stack((first, second, third), -1)
    for k, turn in enumerate(TURNS):
        turned = fourth << turn | fourth >> 32 - turn & (1 << turn) - 1
        pairs[..., k] |= turned & ~signed(ALL)
    lanes = pairs.flatten(-2)  # [unit, chunk, i, half, t, 6]
    words = torch.cat((lanes[..., :4].flatten(2), lanes[..., 4:].flatten(2)), -1)
    return words, scales.flatten()


def signed(word: int) -> int:
    return word - (word >> 31 << 32)
