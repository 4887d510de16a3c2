"""Block sizes by kernel, regime and architecture. Imports neither torch nor Triton.

First come settings that all architectures share, then a table for each architecture, then kernels that only
some architectures run. Times were measured on an H200; no other GPU was tried (``docs/lab/kernels.md``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FEW_LOGITS = 1024  # (token, expert) pairs: up to this number a program routes one token, above several
MOST_ARRIVALS = 512  # maximum tiles per kernel that count their finished programs
LONE_PAIRS = 8  # up to this number each (token, expert) pair is a tile and nothing is sorted
# Maximum (token, expert) pairs that are sorted by comparing all with all; above, torch sorts.
RANK_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of a kernel: output rows, tokens, contraction, and compiler options."""

    rows: int
    tokens: int
    depth: int
    num_warps: int
    num_stages: int


# Products for one token. Those with depth 0 have whole rows in registers.
HEAD_ROW = Tile(8, 1, 512, 4, 3)
OUTPUT_ROW = Tile(1, 1, 0, 8, 1)
QKV_ROW = Tile(2, 1, 0, 2, 1)  # ``rows`` counts rotary pairs (i, i + D/2), which are two rows each
RESIDENT_DEPTH = 8192  # columns: longer rows do not fit in registers
# A draft head's, not measured: if rows are too long, or too many, for registers (similar to the head's, with
# more programs for fewer rows); and gate and up, with ``rows`` of each.
STREAM_ROW = Tile(4, 1, 1024, 4, 3)
GATED_ROW = Tile(2, 1, 0, 4, 1)

SKINNY_TOKENS = 16  # up to this number our split product is faster than cuBLAS


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """The shape of one of ``skinny_fused``'s kernels: see ``skinny_ptx.Product``."""

    units: int  # units of eight rows per program
    num_warps: int
    slots: int
    ahead: int


def skinny_qkv(tokens: int) -> SkinnyConfig | None:
    """Return the shape of QKV for few tokens in one kernel, or None for a split product. A draft head's QKV,
    gate and up take it too; that was not measured."""
    # 8 tokens: 9.8 us, split 11.0; 16: more than 11.1
    return SkinnyConfig(5, 8, 10, 2) if 0 < tokens <= 8 else None


def skinny_output(tokens: int) -> SkinnyConfig | None:
    """Return the same for the output projection, and a draft head's down product."""
    # 2 tokens: 7.8 us, split 8.3; 8: 8.7 and 8.2
    return SkinnyConfig(2, 8, 12, 4) if 1 < tokens <= 4 else None


# The same with ``CompactRows``. In brackets, how much of a step of 20b each saves on an H200.
def compact_qkv(tokens: int) -> SkinnyConfig | None:
    if tokens == 1:
        return SkinnyConfig(1, 2, 12, 1)  # 5.2 %
    # 8 tokens: 2.4 %; 16: 1.6 % slower than the split product
    return SkinnyConfig(5, 8, 8, 1) if 0 < tokens <= 8 else None


def compact_output(tokens: int) -> SkinnyConfig | None:
    if tokens == 1:
        return SkinnyConfig(2, 8, 6, 1)  # 3.1 %
    # 8 tokens: 1.3 %; 16: 0.8 %
    return SkinnyConfig(2, 4, 12, 2) if tokens <= 8 else SkinnyConfig(3, 8, 8, 1)


def compact_head(tokens: int) -> SkinnyConfig | None:
    if tokens == 1:
        return SkinnyConfig(2, 2, 16, 1)  # 3.3 %
    # 8 tokens: 1.7 %; 16: 2.6 %
    return SkinnyConfig(4, 8, 6, 2) if tokens <= 8 else SkinnyConfig(4, 8, 6, 1)


ADD_COLUMNS = 128  # columns per program that adds a split product's parts: 8.2 us, with 512 9.3


def rotate_heads(tokens: int) -> int:
    """Return the heads per rotating program. Many small programs save 0.3 to 1 us for few tokens."""
    return 4 if tokens <= SKINNY_TOKENS else 16


def experts_each(tokens: int, num_experts: int) -> int:
    """Return the number of experts whose logits one program computes, for few tokens."""
    return 1 if tokens * num_experts <= 64 else 4


# Kernels with one row per program, including its norm; times for 8,192 tokens.
ADD_NORM_WARPS = 8  # addition to the residual: 69 us, 4 warps 74; and the sum of a few tokens' experts
COMBINE_WARPS = 4  # sum of many tokens' experts: 103 us, 8 warps 118

ROUTE_HALVES = 1024  # tokens, for 32 experts: see below


def route_in_halves_from(num_experts: int) -> int:
    """Return the tokens from which the router's product uses cuBLAS with bfloat16 halves. Microseconds with
    output projection and addition, for three tf32 passes and for halves: 32 experts, 512 tokens 38.3 and
    38.6, 1,024 63.5 and 60.1, 1,536 90.7 and 80.6; 128 experts, 256 tokens 32.5 and 34.9, 512 61.8 and 43.5,
    1,024 86.6 and 64.8."""
    return ROUTE_HALVES // 2 if num_experts > 64 else ROUTE_HALVES


def expert_tile(tokens_each: int) -> Tile:
    """Return a tile of ``moe``'s products. In gate_up, half of its ``rows`` are gates, half ups; the packed
    layout fixes its ``depth`` (64)."""
    if tokens_each == 1:
        return Tile(16, 1, 64, 1, 4)
    return Tile(64, 16 if tokens_each <= 16 else 32 if tokens_each <= 32 else 64, 64, 4, 4)


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Query rows (tokens x heads of a group) and keys of a prefill tile; ``pairs``: process two tiles at
    once."""

    rows: int
    keys: int
    pairs: bool
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ArchTuning:
    """An architecture's table for kernels that run on all architectures. Defaults are an H200's."""

    multiprocessors: int  # number in the largest GPU; replaced by the device's
    # Bytes of shared memory per multiprocessor, in which two programs of any of these kernels fit.
    shared: int
    # Dense products of 2 to ``SKINNY_TOKENS`` tokens: QKV 11.0 us, output 8.2 (64 deep: 12.2 and 9.3).
    skinny: Tile = Tile(64, 16, 128, 4, 3)
    # The head for the same tokens: 279 us at 8 tokens, cuBLAS 292.
    skinny_head: Tile = Tile(64, 16, 128, 4, 3)
    # One new token per row; ``depth`` counts keys, by which the context is split. 64 x 1,280: 43.5 us, 128
    # keys 42.8, four warps 56; up to 16 rows of a window layer 3.0 us, with the first shape 3.5.
    decode: Tile = Tile(0, 1, 64, 2, 3)
    decode_few_window: Tile = Tile(0, 1, 128, 4, 2)
    # The same for e4m3 blocks, with four times as many programs. 1,024 x 1,536: 342 us, with the first shape
    # 362; 256 x 1,280: 81 and 95.
    decode_e4m3: Tile = Tile(0, 1, 32, 1, 6)
    # 8,192 tokens, TFLOP/s: 449, without pairs 424; in window layers pairs do not help.
    prefill: PrefillTile = PrefillTile(64, 64, True, 4, 2)
    prefill_window: PrefillTile = PrefillTile(64, 64, False, 4, 2)
    route_warps: int = 4  # warps of the router for many tokens

    @property
    def programs(self) -> int:
        """Returns how many programs fill the device."""
        return 2 * self.multiprocessors

    def decode_tile(self, rows: int, *, is_window: bool, is_e4m3: bool) -> Tile:
        if is_window and rows <= 16:
            return self.decode_few_window
        return self.decode_e4m3 if is_e4m3 else self.decode

    def prefill_tile(self, *, is_window: bool) -> PrefillTile:
        return self.prefill_window if is_window else self.prefill

    def route(self, tokens: int) -> Tile:
        """Returns the tile of the router for many tokens; a program takes all experts."""
        return Tile(0, 16 if tokens <= 256 else 32, 64, self.route_warps, 3)

    def context_splits(self, rows: int, kv_heads: int, max_context: int, *, is_e4m3: bool) -> int:
        """Returns the number of parts into which decode attention splits the context: a power of two up to
        64."""
        tile = self.decode_e4m3 if is_e4m3 else self.decode
        tiles, programs = -(-max_context // tile.depth), self.programs * (4 if is_e4m3 else 1)
        splits = 1
        while splits < 64 and splits < tiles and rows * kv_heads * splits < programs:
            splits *= 2
        return splits

    def invariant_parts(self, programs: int, parts: int, num_bytes: int) -> int:
        """Returns for how many parts of a context decode attention has programs, a power of two, or 0 if one
        program takes a whole context. ``num_bytes``: memory for one part of every row."""
        parts = 1 << (parts - 1).bit_length()
        is_split = parts > 1 and programs < self.programs and parts * num_bytes <= INVARIANT_BYTES
        return parts if is_split else 0

    def invariant_product(self, tokens: int, item_size: int, out_size: int, *, is_head: bool) -> Tile:
        """Returns the tile of a dense product. Its shape may vary, because the tensor cores add a token's
        terms in one order whatever the tile (``tests/gpu/invariant/test_invariant.py``)."""
        tiles = _INVARIANT_HEAD if is_head else _INVARIANT_PRODUCTS
        tile = next(tile for most, tile in tiles if tokens <= most)
        if tile.rows * tile.tokens * out_size > self.shared - KIB:  # the result crosses shared memory
            tile = replace(tile, tokens=tile.tokens // 2)
        stages = (self.shared - 4 * KIB) // ((tile.rows + tile.tokens) * tile.depth * item_size)
        return replace(tile, num_stages=max(2, min(tile.num_stages, stages)))

    def skinny_splits(self, tiles: int, steps: int) -> int:
        """Returns the number of parts of a contraction of ``steps`` tiles; every part has work."""
        wanted = max(1, min(steps, self.programs // tiles))
        each = -(-steps // wanted)
        return -(-steps // each)

    def route_slices(self, tiles: int) -> int:
        """Returns the number of programs that share the hidden size; split tiles need a counter of finished
        programs."""
        if tiles > MOST_ARRIVALS:
            return 1
        return max(1, min(15, self.programs // tiles))


KIB = 1024
# With ``--batch-invariant``: maximum tokens of a dense product, and its tile. Weight rows are a multiple of
# 64, so that Hopper uses the same instructions for every number of tokens. One H100, microseconds for 256 and
# 1,024 tokens: QKV 28 and 73 (cuBLAS 30 and 50), head 599 and 1,882 (610 and 1,685).
_INVARIANT_PRODUCTS = (
    (16, Tile(64, 16, 128, 4, 6)),
    (32, Tile(64, 32, 128, 4, 5)),
    (128, Tile(64, 64, 64, 4, 6)),
    (256, Tile(64, 128, 64, 4, 4)),
    (512, Tile(128, 128, 64, 8, 4)),
    (1 << 62, Tile(128, 256, 64, 8, 3)),
)
_INVARIANT_HEAD = (
    *_INVARIANT_PRODUCTS[:2],
    (64, Tile(64, 64, 64, 4, 6)),
    (128, Tile(64, 128, 64, 4, 4)),
    (1 << 62, Tile(128, 256, 64, 8, 4)),
)
INVARIANT_STAGES = 4  # tiles of keys in flight for one token per row
INVARIANT_BYTES = 64 << 20  # maximum memory for parts of contexts
INVARIANT_SLICES = 9  # parts of the router's contraction
INVARIANT_ROUTED = MOST_ARRIVALS * 16  # maximum tokens per launch of the router, in tiles of 16

H200 = ArchTuning(132, 228 * KIB)


def _consumer(multiprocessors: int, stages: int = 2) -> ArchTuning:
    """``stages``: of prefill; on sm_120, more than one spills registers."""
    tile = PrefillTile(64, 64, False, 4, stages)
    return ArchTuning(multiprocessors, 100 * KIB, prefill=tile, prefill_window=tile)


# Keys are the compilers' names. All tables except the H200's are derived from it, the hardware's sizes and
# the compiler (two programs of every kernel fit a multiprocessor, at most two registers are spilled) and were
# never run.
ARCH_TUNINGS = {
    "sm_80": ArchTuning(  # A100: converts e4m3 in integers; paired tiles do not fit its registers
        108,
        164 * KIB,
        prefill=PrefillTile(64, 64, False, 4, 2),
    ),
    "sm_90": H200,
    "sm_100": ArchTuning(148, 228 * KIB),  # B200
    # Consumer GPUs: 100 KiB, of which a program gets at most 99. The paired tiles do not fit.
    "sm_86": _consumer(84),  # RTX 3090, A10, A4000, A6000
    "sm_89": _consumer(142),  # RTX 4080, L4, L40S
    "sm_120": _consumer(188, 1),  # RTX 5080, RTX PRO 6000
    "sm_121": _consumer(48, 1),  # DGX Spark
    "gfx942": ArchTuning(  # MI300X, MI325X: a quarter of the shared memory, so fewer steps ahead
        304,
        64 * KIB,
        skinny=Tile(64, 16, 128, 4, 2),
        skinny_head=Tile(64, 16, 128, 4, 2),
        prefill=PrefillTile(64, 64, False, 4, 2),
    ),
    "gfx950": ArchTuning(256, 160 * KIB),  # MI350X, MI355X
    # R9700: HIP counts its 64 compute units as 32 multiprocessors. Waves have 32 threads, so the other
    # tables' shapes would spill up to 293 registers.
    "gfx1201": ArchTuning(
        32,
        128 * KIB,
        decode=Tile(0, 1, 64, 4, 3),
        decode_e4m3=Tile(0, 1, 64, 4, 3),
        decode_few_window=Tile(0, 1, 64, 4, 2),
        prefill=PrefillTile(64, 64, False, 8, 2),
        prefill_window=PrefillTile(64, 64, False, 8, 2),
        route_warps=8,
    ),
}


def wave_size(architecture: str) -> int:
    """Returns the threads per wave (warp) of ``gfxXYZ``: 64 for CDNA (gfx9), 32 for RDNA (since gfx10)."""
    return 64 if architecture.startswith("gfx9") else 32


def arch_tuning(architecture: str, multiprocessors: int) -> ArchTuning:
    """Return the table of ``sm_XY`` or ``gfxXYZ``, or the least demanding table of its family."""
    least = "gfx942" if architecture.startswith("gfx9") else "gfx1201"
    if architecture.startswith("sm_"):
        least = "sm_100" if architecture.startswith("sm_10") else "sm_86"
    found = ARCH_TUNINGS.get(architecture, ARCH_TUNINGS[least])
    return replace(found, multiprocessors=multiprocessors)


GEMV_TOKENS = 256  # maximum tokens of the streaming expert products, with at most this many pairs per expert:
GEMV_PAIRS_EACH = 12  # on average; fewer where grouped_moe can be used (``GROUPED_FROM``)
DIRECT_TOKENS = 16  # up to this number their columns are the tokens; above, pairs sorted by expert


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """The shape of a streaming expert product: the work of a warp and of a program."""

    tiles: int  # row tiles (of 16) per warp
    columns: int  # inputs / 8
    num_warps: int
    group: int  # maximum chunks of 64 columns that are loaded together
    groups: int  # groups in flight
    splits: int  # parts of the contraction, if they divide its chunks


SHARE_CHUNKS = 23  # maximum chunks of the intermediate size on one of two or more ranks


def gemv_gate_up(tokens: int, pairs_each: float, chunks: int = 45) -> GemvConfig:
    """Return the shape of gate_up. ``pairs_each``: mean pairs per expert; ``chunks``: chunks of the
    intermediate size. Measured on an H200: see also ``gemv_down``."""
    if tokens == 1 and chunks <= SHARE_CHUNKS:
        return GemvConfig(1, 1, 2, 9, 1, 1)  # 9.2 us, as below 10.6 (23 chunks)
    if tokens == 1:
        return GemvConfig(1, 1, 2, 3, 2, 1)  # 12.3 us
    if tokens <= 3:
        return GemvConfig(1, 1, 4, 3, 2, 1)  # 2 tokens, with down: 34.8 us, as below 36.2
    if tokens <= 8:
        return GemvConfig(1, 1, 4, 9, 1, 1)  # 8 tokens: 51.4 us of 32 experts, 66.3 of 128
    if tokens <= DIRECT_TOKENS:
        return GemvConfig(1, 2, 2, 9, 1, 1)
    return GemvConfig(2, 2, 2, 3, 1, 1) if pairs_each > 4 else GemvConfig(1, 1, 2, 9, 1, 1)


def gemv_down(tokens: int, pairs_each: float, chunks: int = 45) -> GemvConfig:
    if chunks <= SHARE_CHUNKS and tokens == 1:
        return GemvConfig(1, 1, 1, 12, 1, 2)  # 5.7 us, as below 5.6, but the all-reduce has 8 parts to add
    if chunks <= SHARE_CHUNKS and tokens <= 8:
        return GemvConfig(1, 1, 4, 3, 3, 1)  # 8 tokens of 128 experts: 21.4 us, as below 23.8
    if tokens == 1:
        return GemvConfig(1, 1, 1, 5, 1, 5)  # 6.4 us
    if tokens <= 3:
        return GemvConfig(1, 1, 1, 3, 2, 3)  # 2 tokens, with gate_up: 34.4 us, as below 45.1
    if tokens <= 8:
        return GemvConfig(2, 1, 2, 3, 3, 1)  # with gate_up: 4 tokens 65.3 us, as above 67.5; 8: 110 and 115
    if tokens <= DIRECT_TOKENS:
        return GemvConfig(2, 2, 2, 3, 2, 1)  # with gate_up: 16 tokens 131 us of 32 experts, 233 of 128
    if pairs_each > 4:
        return GemvConfig(2, 2, 2, 3, 2, 1)  # with gate_up: 48 tokens 148 us of 32; a Hopper GPU has better
    return GemvConfig(1, 1, 2, 9, 1, 1)  # with gate_up: 32 tokens 133 us of 32, 291 of 128; 64: 400; 128: 491


def tokens_each(num_pairs: int, num_experts: int) -> int:
    """Return the tokens of a grouped tile: 16, 32 or 64, by the mean number of pairs per expert."""
    mean = num_pairs / num_experts
    return 16 if mean <= 16 else 32 if mean <= 48 else 64


# Pairs per expert above which ``grouped_moe`` is used if possible. Sustained microseconds per layer, uneven
# routing, for ``gemv_moe`` and ``grouped_moe``: 32 experts, 24 tokens (3 pairs) 117 and 117, 32 tokens 128
# and 118, 48 140 and 123; 128 experts, 64 tokens (2 pairs) 398 and 407, 96 444 and 437, 128 469 and 442.
GROUPED_FROM = 3
# Pairs per expert above which e4m3 inputs are used if they are allowed. For fewer, decoding weights to e4m3
# takes longer than the products: 32 experts, 128 tokens 298 us, in bfloat16 187; 1,024 tokens 380 and 469.
E4M3_FROM = 64


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """Shape of a tile of ``grouped_moe``: pairs of a wide and of a narrow tile, and steps fetched ahead.

    ``tail``: additional pairs of a wide tile, which use the decoded weights in a second product, a power of
    two or 0. ``mid``: pairs of a third kind of tile, for the remainder, or 0; unused with a tail. ``warps``:
    computing warps, with 16 weight rows each, ``units`` times per step. ``overlap``: a chunk's product is in
    flight while the next chunk is decoded, which takes separate registers for its operand.
    """

    wide: int
    narrow: int
    num_stages: int
    registers: int = 0  # registers per thread at launch; 0: the compiler's choice
    programs: int = 1  # programs per multiprocessor
    tail: int = 0
    mid: int = 0
    warps: int = 8
    units: int = 1
    overlap: bool = True

    @property
    def middle(self) -> int:
        """``mid``, or 0 if such tiles would be useless."""
        return self.mid if self.narrow < self.mid < self.wide and not self.tail else 0

    def row_blocks(self, columns: int, *, is_gate_up: bool) -> int:
        """Returns a program's number of weight-row blocks for ``columns``; gate_up makes one column from two
        rows.

        A checkpoint may have fewer rows: down reads whole chunks of gate_up's columns, so all are written.
        """
        rows = columns * 2 if is_gate_up else columns
        return -(-rows // (16 * self.warps * self.units))

    @property
    def most_left_out(self) -> int:
        """Returns the maximum number of rows without a pair in an expert's last tile."""
        rest = self.wide - self.middle - self.narrow
        return max(self.tail, self.narrow, self.middle - self.narrow, rest) - 1


def grouped(pairs_each: float, num_experts: int, *, fp8: bool = False) -> GroupedTile:
    """Returns the tile for the mean number of pairs per expert, and for e4m3 inputs.

    Times are sustained microseconds per layer (docs/lab/kernels.md).
    """
    if fp8 and pairs_each <= 48:  # only with --batch-invariant
        return GroupedTile(64, 32, 8)
    if fp8 and pairs_each <= 176:
        return GroupedTile(128, 32, 7, tail=32)
    if fp8:
        return GroupedTile(256, 64, 5, tail=32)  # 120b, 8,192: 2,505, without a tail 2,530
    if pairs_each <= 1:  # only with --batch-invariant
        return GroupedTile(16, 8, 5, registers=64, programs=4, warps=4, units=1, overlap=False)
    if pairs_each <= (4.5 if num_experts > 64 else 9):
        # 20b, 64 tokens: 138, with three programs 149; 128 tokens of 120b 442, 160 486 (with three 481).
        return GroupedTile(16, 8, 3, registers=64, programs=4, warps=4, units=3, overlap=False)
    if pairs_each <= 10 and num_experts > 64:
        return GroupedTile(16, 8, 4, registers=80, programs=3, warps=4, units=3)  # 120b, 256: 527, four 541
    if pairs_each <= 24 and num_experts > 64:
        return GroupedTile(32, 16, 3, registers=120, programs=2, warps=4, units=5)  # 120b, 512: 597, else 615
    if pairs_each <= 20:  # 20b, 96 tokens: 141, 128: 158, 160: 156; as below 145, 159, 162; 192: 198 and 190
        return GroupedTile(32, 16, 2, registers=64, programs=4, warps=4, units=3, overlap=False)
    if pairs_each <= 24:
        return GroupedTile(32, 16, 4, registers=120, programs=2, warps=4, units=3)
    if pairs_each <= 48 and num_experts <= 64:
        return GroupedTile(64, 32, 4, units=3)  # 20b, 256: 193, as below 199
    if pairs_each <= 96:
        # 20b, 512: 315; 120b, 1,024: 800
        return GroupedTile(64, 32, 3, registers=120, programs=2, warps=4, units=3)
    if pairs_each <= 176:
        return GroupedTile(128, 32, 4, tail=32)  # 20b, 1,024: 459
    return GroupedTile(256, 64, 3, mid=128)  # 120b, 8,192: 3,250


# Maximum pairs that one kernel compares all with all; above, two kernels count and sort.
PERMUTE_AT_ONCE = 2048
PERMUTE_PROGRAMS = 128  # programs that sort pairs: about one per multiprocessor

# The all-reduce (kernels/triton/reduce): measured on 2 GPUs, predicted for more (docs/lab/kernels.md).
REDUCE_FLAGS = 512  # maximum programs of a two-shot call
# Up to this number ranks send float32: few bytes, and the sum is as exact as on one rank.
REDUCE_WIDE_ROWS = 16
# One-shot calls without a norm: maximum rows that are divided among programs, and the lanes of eight columns
# per program (at least one warp).
REDUCE_SPLIT_ROWS = 64
REDUCE_LANES = 32
REDUCE_WARPS = 16  # maximum warps of a program: a thread has eight columns and waits once
# Programs per round of the search for a filter's threshold: four times as many as an H200 runs at once.
ROUND_PROGRAMS = 2112


def one_shot_rows(ranks: int) -> int:
    """Return the maximum rows for which every rank sums all rows; above, each rank sums and norms its own
    rows."""
    return {2: 1024, 4: 96, 8: 32}[ranks]


def reduce_programs(rows: int) -> int:
    """Return the programs of a two-shot call in which a rank owns ``rows``: two fit a multiprocessor with 64
    registers per thread (2 ranks), one with more."""
    return min(rows, 256)
