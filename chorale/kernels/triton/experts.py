"""Packing of MXFP4 experts: from the checkpoint's rows to tiles that a program reads in one run.

A matrix [N, K] becomes tiles of 64 rows and 128 columns: 4 KB of weights that follow each other, and 256
bytes of scales. Byte ``j`` (0..63) of a tile's row holds column ``j`` in its low and column ``64 + j`` in
its high nibble, so that the two halves of a tile meet two contiguous pieces of the input. Its four scales
are those of columns 0, 32, 64 and 96. N and K are padded with zero weights.

A scale byte ``s`` (2^(s - 127)) is stored as ``s + 126``: the exponent field of 2^(s - 1), which is what
multiplies an e2m1 weight whose bits were put into a bfloat16 or float32 as they are (2^-126 of its value).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chorale.errors import ConfigError
from chorale.kernels.ops import ExpertTensors

ROWS = 64
COLUMNS = 128
_GROUP = 32
_LARGEST_SCALE = 128  # as a byte: 2^1. Beyond, s + 126 is no exponent. Checkpoints are at 110 to 125.


@dataclass(frozen=True, slots=True)
class Matrices:
    """Packed matrices of one shape, one for each expert (and, for gate_up, two)."""

    blocks: torch.Tensor  # [..., E, N / 64, K / 128, 64, 64] uint8
    scales: torch.Tensor  # [..., E, N / 64, K / 128, 64, 4] uint8


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's experts. gate_up is taken apart: first all gates' rows, then all ups'."""

    gate_up: Matrices  # [2, E, ...] of [I, H]
    down: Matrices  # [E, ...] of [H, I]
    gate_up_bias: torch.Tensor  # [2, E, I]
    down_bias: torch.Tensor  # [E, H]
    swiglu_limit: float
    swiglu_alpha: float
    dtype: torch.dtype

    @property
    def num_experts(self) -> int:
        return self.down_bias.shape[0]

    @property
    def intermediate(self) -> int:
        return self.gate_up_bias.shape[2]


def pack_experts(tensors: ExpertTensors) -> Experts:
    """Raises ``ConfigError`` for dense experts and for scales of 4 and more (or NaN)."""
    parts = (tensors.gate_up_blocks, tensors.gate_up_scales, tensors.down_blocks, tensors.down_scales)
    gate_up_blocks, gate_up_scales, down_blocks, down_scales = parts
    if gate_up_blocks is None or gate_up_scales is None or down_blocks is None or down_scales is None:
        raise ConfigError(
            "ops 'triton' reads MXFP4 experts, this checkpoint's are dense: use --ops reference"
        )
    largest = torch.maximum(gate_up_scales.max(), down_scales.max())
    if int(largest) > _LARGEST_SCALE:
        raise ConfigError(f"ops 'triton': an MXFP4 scale byte is {int(largest)}, over {_LARGEST_SCALE}")
    halves = [pack(gate_up_blocks[:, half::2], gate_up_scales[:, half::2]) for half in (0, 1)]
    bias = tensors.gate_up_bias.to(tensors.dtype)
    return Experts(
        gate_up=Matrices(
            torch.stack([half.blocks for half in halves]), torch.stack([half.scales for half in halves])
        ),
        down=pack(down_blocks, down_scales),
        gate_up_bias=torch.stack((bias[:, 0::2], bias[:, 1::2])),
        down_bias=tensors.down_bias.to(tensors.dtype).contiguous(),
        swiglu_limit=tensors.swiglu_limit,
        swiglu_alpha=tensors.swiglu_alpha,
        dtype=tensors.dtype,
    )


def pack(blocks: torch.Tensor, scales: torch.Tensor) -> Matrices:
    """blocks [E, N, K / 32, 16], scales [E, N, K / 32] as in a checkpoint. One expert at a time."""
    experts, rows, groups = scales.shape
    row_tiles = -(-rows // ROWS)
    column_tiles = -(-groups * _GROUP // COLUMNS)
    new_blocks = blocks.new_empty(experts, row_tiles, column_tiles, ROWS, COLUMNS // 2)
    new_scales = scales.new_empty(experts, row_tiles, column_tiles, ROWS, COLUMNS // _GROUP)
    for expert in range(experts):
        codes = blocks.new_zeros(row_tiles * ROWS, column_tiles * COLUMNS)
        codes[:rows, 0 : groups * _GROUP : 2] = (blocks[expert] & 15).flatten(1)
        codes[:rows, 1 : groups * _GROUP : 2] = (blocks[expert] >> 4).flatten(1)
        halves = codes.view(row_tiles, ROWS, column_tiles, 2, COLUMNS // 2)
        new_blocks[expert] = (halves[..., 0, :] | halves[..., 1, :] << 4).transpose(1, 2)
        padded = scales.new_zeros(row_tiles * ROWS, column_tiles * COLUMNS // _GROUP)
        padded[:rows, :groups] = scales[expert]
        padded += 126
        new_scales[expert] = padded.view(row_tiles, ROWS, column_tiles, -1).transpose(1, 2)
    return Matrices(new_blocks, new_scales)
