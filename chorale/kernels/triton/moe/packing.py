"""Packs MXFP4 experts: converts the checkpoint's rows to the operand that a tensor core reads from registers.

A matrix [N, K] becomes row tiles of 16 rows and chunks of 64 columns: 512 bytes of weights, 16 per lane, and
32 bytes of scales. Lane ``4 g + t`` holds rows ``g`` and ``8 + g`` of columns ``16 t`` to ``16 t + 15``. Its
word ``j`` is the A operand of one m16n8k16 step: part ``i = p + 2 q`` of it is a pair of bfloat16, row ``8 p
+ g``, columns ``16 t + 4 j + 2 q + {0, 1}``. The order of a sum's terms is free, so the input is read in that
order (``fragment_columns``) and nothing is shuffled at run time.

In gate_up, rows ``g`` of a tile are gates and rows ``8 + g`` the matching ups: both are in one thread of the
product. N and K are padded with zero weights (20b and 120b need none: 180 x 16 rows, 45 x 64).

``part_of_word`` defines the bit positions of a word's eight nibbles: extracting a pair takes at most two
shifts and two logical operations. No arrangement needs fewer: the four bits of a bfloat16 that e2m1 uses (15,
8, 7, 6) do not tile a half word, so two of the parts are the XOR of two shifted words.

A scale byte ``s`` (2^(s - 127)) is stored as ``s + 126``: the exponent field of 2^(s - 1), the factor for an
e2m1 weight whose bits were placed in a bfloat16 or float32 unchanged (2^-126 of its value).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from chorale.errors import ConfigError
from chorale.kernels.ops import ExpertTensors
from chorale.kernels.triton.launch import is_hopper

ROWS = 16
COLUMNS = 64
_GROUP = 32
# Scale byte of 2^1; for larger bytes, s + 126 is not an exponent. Checkpoints have 110 to 125.
_LARGEST_SCALE = 128
_SCRATCH = 1 << 25  # bytes of a checkpoint's blocks packed at once; takes about 20 times as much memory
_PART_BITS = 0x81C081C0  # the used bits of a bfloat16 pair: sign, two of exponent, one of mantissa


@dataclass(frozen=True, slots=True)
class Matrices:
    """Packed matrices of one shape, one for each expert."""

    blocks: torch.Tensor  # [E, row tiles, chunks, 32 lanes, 4 words] int32
    scales: torch.Tensor  # [E, row tiles, chunks, 8 (g), 2 (t // 2: group of 32), 2 (p)] uint8

    @property
    def row_tiles(self) -> int:
        return self.blocks.shape[1]

    @property
    def chunks(self) -> int:
        return self.blocks.shape[2]

    def largest(self, rows: int, *, paired: bool = False) -> torch.Tensor:
        """Return each row's largest exponent, uint8: [E, rows]; for gate_up (``paired``) [2, E, rows]."""
        largest = self.scales.amax(dim=(2, 4))  # [E, row tiles, g, p]
        if paired:
            return largest.permute(3, 0, 1, 2).flatten(2)[..., :rows].contiguous()
        return largest.transpose(2, 3).flatten(1)[:, :rows].contiguous()


@dataclass(frozen=True, slots=True)
class Owned:
    """The experts of a rank that has whole experts."""

    first: int  # id
    total: int  # experts of the model


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's experts: all, or a rank's whole experts."""

    gate_up: Matrices  # [2 I, H]; a tile has 8 gates and their 8 ups
    down: Matrices  # [H, I]
    gate_up_bias: torch.Tensor  # [2, E, I]
    down_bias: torch.Tensor  # [E, H]
    swiglu_limit: float
    swiglu_alpha: float
    dtype: torch.dtype
    # For e4m3 inputs: each row's largest exponent, uint8.
    gate_up_largest: torch.Tensor | None = None  # [2, E, I]
    down_largest: torch.Tensor | None = None  # [E, H]
    # Divisors of e4m3 inputs, if the checkpoint has them; otherwise each token's largest value, and a bound,
    # are used.
    gate_up_input_scale: float | None = None
    down_input_scale: float | None = None
    owned: Owned | None = None  # None: all experts, or some columns of all

    @property
    def num_experts(self) -> int:
        return self.down_bias.shape[0]

    @property
    def first(self) -> int | None:
        """Returns the id of the first expert, or None if this rank has all experts."""
        return None if self.owned is None else self.owned.first

    @property
    def total(self) -> int:
        """Returns the number of the model's experts, which share a step's pairs."""
        return self.num_experts if self.owned is None else self.owned.total

    @property
    def intermediate(self) -> int:
        return self.gate_up_bias.shape[2]


def pack_experts(tensors: ExpertTensors) -> Experts:
    """Pack experts. Raises ``ConfigError`` for dense experts, scales of 4 or more (or NaN), and e4m3 without
    Hopper."""
    parts = (tensors.gate_up_blocks, tensors.gate_up_scales, tensors.down_blocks, tensors.down_scales)
    gate_up_blocks, gate_up_scales, down_blocks, down_scales = parts
    if gate_up_blocks is None or gate_up_scales is None or down_blocks is None or down_scales is None:
        raise ConfigError(
            "ops 'triton' reads MXFP4 experts, this checkpoint's are dense: use --ops reference"
        )
    for scales in () if gate_up_scales.is_meta else (gate_up_scales, down_scales):
        if (largest := int(scales.max())) > _LARGEST_SCALE:
            raise ConfigError(f"ops 'triton': an MXFP4 scale byte is {largest}, over {_LARGEST_SCALE}")
    if tensors.fp8_activations and not (tensors.dtype == torch.bfloat16 and is_hopper(gate_up_blocks.device)):
        raise ConfigError("--moe-activation-dtype fp8 needs a Hopper GPU and --dtype bfloat16")
    bias = tensors.gate_up_bias.to(tensors.dtype)
    gate_up, down = pack(gate_up_blocks, gate_up_scales, paired=True), pack(down_blocks, down_scales)
    return Experts(
        gate_up=gate_up,
        down=down,
        gate_up_bias=torch.stack((bias[:, 0::2], bias[:, 1::2])),
        down_bias=tensors.down_bias.to(tensors.dtype).contiguous(),
        swiglu_limit=tensors.swiglu_limit,
        swiglu_alpha=tensors.swiglu_alpha,
        dtype=tensors.dtype,
        gate_up_largest=gate_up.largest(bias.shape[1] // 2, paired=True) if tensors.fp8_activations else None,
        down_largest=down.largest(tensors.down_bias.shape[1]) if tensors.fp8_activations else None,
        gate_up_input_scale=tensors.gate_up_input_scale,
        down_input_scale=tensors.down_input_scale,
    )


def pack(blocks: torch.Tensor, scales: torch.Tensor, *, paired: bool = False) -> Matrices:
    """Pack blocks [E, N, K / 32, 16] and scales [E, N, K / 32] of a checkpoint. ``paired``: rows
    alternate."""
    experts, rows, groups = scales.shape
    tiles, chunks = -(-rows // ROWS), -(-groups * _GROUP // COLUMNS)
    new_blocks = torch.empty(experts, tiles, chunks, 32, 4, dtype=torch.int32, device=blocks.device)
    new_scales = scales.new_empty(experts, tiles, chunks, 8, 2, 2)
    step = max(1, _SCRATCH // (tiles * chunks * 512))
    for some in (slice(first, first + step) for first in range(0, experts, step)):
        grid = _by_tile(blocks[some].flatten(2), tiles, chunks * COLUMNS // 2, paired)
        new_blocks[some] = _words(grid.view(*grid.shape[:4], chunks, 4, 4, 2))
        grid = _by_tile(scales[some], tiles, chunks * 2, paired) + 126
        new_scales[some] = grid.view(*grid.shape[:4], chunks, 2).permute(0, 1, 4, 3, 5, 2)
    return Matrices(new_blocks, new_scales)


def _by_tile(rows: torch.Tensor, tiles: int, width: int, paired: bool) -> torch.Tensor:
    """Arrange [E, N, B] as [E, tiles, 2 (p), 8 (g), width], padded with zeros."""
    missing = (0, width - rows.shape[2], 0, tiles * ROWS - rows.shape[1])
    if any(missing):
        rows = torch.nn.functional.pad(rows, missing)
    if paired:
        return rows.reshape(len(rows), tiles, 8, 2, width).transpose(2, 3)
    return rows.reshape(len(rows), tiles, 2, 8, width)


def _words(pairs: torch.Tensor) -> torch.Tensor:
    """Pack bytes (two columns each) [E, tiles, 2 (p), 8 (g), chunks, 4 (t), 4 (j), 2 (q)] into words."""
    tables = torch.tensor(_tables(), dtype=torch.int32, device=pairs.device)
    lanes = pairs.permute(0, 1, 4, 3, 5, 6, 2, 7)  # e, tile, chunk, g, t, j, p, q
    words = tables[0][lanes[..., 0, 0].int()]
    for part in (1, 2, 3):
        words ^= tables[part][lanes[..., part % 2, part // 2].int()]
    return words.flatten(3, 4)


# ------------------------------------------------------------------ positions of the bits


def _rotated(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & 0xFFFFFFFF


def part_of_word(word: int, part: int) -> int:
    """Return part 0 .. 3 of a word as two bfloat16, times 2^-126: the specification of ``dequant.UNPACK``."""
    if part == 0:
        return word & _PART_BITS
    if part == 1:
        return _rotated(word, 12) & _PART_BITS
    other = _rotated(word, 6) if part == 2 else _rotated(word, 8)
    return (_rotated(word, 2) ^ other) & _PART_BITS


@functools.cache
def _tables() -> tuple[tuple[int, ...], ...]:
    """Return [4 parts][256] int32: the bits that a byte (low nibble: even column) adds to the word by XOR.

    Extracting parts is linear over bits, so inserting them is the inverse of a 32 x 32 matrix.
    """
    places = [half * 16 + bit for half in (0, 1) for bit in (6, 7, 8, 15)]  # positions of a byte's bits
    outputs = [(part, place) for part in range(4) for place in places]
    # Row of output bit n: the bits of the word whose XOR it is (low half) | unit vector n (high half).
    rows = [
        sum(((part_of_word(1 << bit, part) >> place) & 1) << bit for bit in range(32)) | 1 << (32 + n)
        for n, (part, place) in enumerate(outputs)
    ]
    for bit in range(32):
        pivot = next(n for n in range(bit, 32) if rows[n] >> bit & 1)
        rows[bit], rows[pivot] = rows[pivot], rows[bit]
        rows = [row ^ rows[bit] if n != bit and row >> bit & 1 else row for n, row in enumerate(rows)]
    columns = [sum((rows[bit] >> (32 + n) & 1) << bit for bit in range(32)) for n in range(32)]
    return tuple(
        tuple(_signed(_xor(columns[8 * part : 8 * part + 8], byte)) for byte in range(256))
        for part in range(4)
    )


def _xor(columns: list[int], byte: int) -> int:
    return functools.reduce(int.__xor__, (c for n, c in enumerate(columns) if byte >> n & 1), 0)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def fragment_columns() -> torch.Tensor:
    """Return [64] int64: the column of a chunk at each position (16 j + 8 q + 2 t + half) of the
    contraction."""
    place = torch.arange(COLUMNS)
    return place % 8 // 2 * 16 + place // 16 * 4 + place // 8 % 2 * 2 + place % 2
