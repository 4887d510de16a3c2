"""Block sizes by kernel, regime and architecture. Imports neither torch nor Triton.

Settings that all architectures share come first, then a table for each architecture, then kernels that only
some of them run. Times were measured on an H200; no other GPU was tried (``docs/lab/kernels.md``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FEW_LOGITS = 1024  # (token, expert) pairs: up to here a program routes one token, above it takes several
MOST_ARRIVALS = 512  # tiles of one kernel that wait for their last program
LONE_PAIRS = 8  # up to here each (token, expert) pair is its own tile and nothing is sorted
RANK_LIMIT = 1024  # (token, expert) pairs that are sorted by comparing all with all
SORT_LIMIT = 4096  # (token, expert) pairs that one program sorts; above, torch sorts


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel's shape: output rows, tokens, contraction, and how it is compiled."""

    rows: int
    tokens: int
    depth: int
    num_warps: int
    num_stages: int


def head_row() -> Tile:
    """The head's product for one token."""
    return Tile(8, 1, 512, 4, 3)


def output_row() -> Tile:
    """The output projection for one token; its ``rows`` are whole in registers."""
    return Tile(1, 1, 0, 8, 1)


def qkv_row() -> Tile:
    """QKV for one token. ``rows`` counts rotary pairs: a program makes rows (i, i + D/2), twice as many."""
    return Tile(2, 1, 0, 2, 1)


RESIDENT_DEPTH = 8192  # columns: longer rows do not fit in registers


def stream_row() -> Tile:
    """A draft head's products for one token whose rows are too long, or too many, to be whole in registers.
    Not measured: a shape like the head's, with more programs for fewer rows."""
    return Tile(4, 1, 1024, 4, 3)


def gated_row() -> Tile:
    """A draft head's gate and up for one token; ``rows`` of each, whole in registers. Not measured."""
    return Tile(2, 1, 0, 4, 1)


SKINNY_TOKENS = 16  # up to here our split product is faster than cuBLAS


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """One of ``skinny_fused``'s kernels: see ``skinny_ptx.Product``."""

    units: int  # of eight rows: a program's
    num_warps: int
    group: int
    groups: int
    ahead: int
    launch_dependents: int = 2
    registers: int = 0  # a thread, if fewer than the compiler would take


def skinny_qkv(tokens: int) -> SkinnyConfig | None:
    """QKV of 2 to ``SKINNY_TOKENS`` tokens in one kernel, or None for a split product (gpu_dense.py)."""
    # 8 tokens: 9.8 us, split 11.0; 16: more than 11.1
    return SkinnyConfig(5, 8, 1, 2, 2) if tokens <= 8 else None


def skinny_output(tokens: int) -> SkinnyConfig | None:
    """The output projection, likewise."""
    return SkinnyConfig(2, 8, 2, 3, 2) if tokens <= 4 else None  # 2 tokens: 7.8 us, split 8.3; 8: 8.7 and 8.2


def draft_qkv(tokens: int) -> SkinnyConfig | None:
    """A draft head's QKV of few tokens in one kernel, or None. Not measured: the model's shape."""
    return SkinnyConfig(5, 8, 1, 2, 2) if 0 < tokens <= 8 else None


def draft_gated(tokens: int) -> SkinnyConfig | None:
    """A draft head's gate and up of few tokens in one kernel, or None. Not measured."""
    return SkinnyConfig(5, 8, 1, 2, 2) if 1 < tokens <= 8 else None


def draft_down(tokens: int) -> SkinnyConfig | None:
    """A draft head's down product of few tokens in one kernel, or None. Not measured."""
    return SkinnyConfig(2, 8, 2, 3, 2) if 1 < tokens <= 4 else None


ADD_COLUMNS = 128  # of a program that adds up a split product's parts: 8.2 us, with 512 9.3


def rotate_heads(tokens: int) -> int:
    """Heads of a program that rotates. Many small programs save 0.3 to 1 us for few tokens."""
    return 4 if tokens <= SKINNY_TOKENS else 16


def experts_each(tokens: int, num_experts: int) -> int:
    """Experts whose logits one program computes, for few tokens."""
    return 1 if tokens * num_experts <= 64 else 4


# One row a program, with its norm; 8,192 tokens.
ADD_NORM_WARPS = 8  # addition to the residual: 69 us, 4 warps 74; and the sum of a few tokens' experts
COMBINE_WARPS = 4  # sum of many tokens' experts: 103 us, 8 warps 118

ROUTE_HALVES = 1024  # of 32 experts: see below


def route_in_halves_from(num_experts: int) -> int:
    """Tokens from which the router's product is cuBLAS's, in bfloat16 halves. With output projection and
    addition, three tf32 passes and halves, us: 32 experts, 512 tokens 38.3 and 38.6, 1,024 63.5 and 60.1,
    1,536 90.7 and 80.6; 128 experts, 256 tokens 32.5 and 34.9, 512 61.8 and 43.5, 1,024 86.6 and 64.8."""
    return ROUTE_HALVES // 2 if num_experts > 64 else ROUTE_HALVES


def expert_tile(tokens_each: int) -> Tile:
    """A tile of ``moe``'s products. In gate_up, half of its ``rows`` are gates, half ups; the packed layout
    fixes its ``depth`` (64)."""
    if tokens_each == 1:
        return Tile(16, 1, 64, 1, 4)
    return Tile(64, 16 if tokens_each <= 16 else 32 if tokens_each <= 32 else 64, 64, 4, 4)


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Query rows (tokens x heads of a group) and keys of a prefill tile; ``pairs``: two such at once."""

    rows: int
    keys: int
    pairs: bool
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ArchTuning:
    """An architecture's table for kernels that run on all of them. Defaults are an H200's."""

    multiprocessors: int  # of its largest GPU; replaced by the device's number
    # Bytes of shared memory for all programs of a multiprocessor; two fit, of any of these kernels.
    shared: int
    # Dense products of 2 to ``SKINNY_TOKENS`` tokens: QKV 11.0 us, output 8.2 (64 deep: 12.2 and 9.3).
    skinny: Tile = Tile(64, 16, 128, 4, 3)
    # The head for as many: 279 us at 8 tokens, where cuBLAS takes 292.
    skinny_head: Tile = Tile(64, 16, 128, 4, 3)
    # One new token a row; ``depth`` counts keys, and the context is split by them. 64 x 1,280: 43.5 us, 128
    # keys 42.8, four warps 56; up to 16 rows of a window layer 3.0 us, with the first shape 3.5.
    decode: Tile = Tile(0, 1, 64, 2, 3)
    decode_few_window: Tile = Tile(0, 1, 128, 4, 2)
    # 8,192 tokens, TFLOP/s: 449, without pairs 424; in window layers pairs are of no use.
    prefill: PrefillTile = PrefillTile(64, 64, True, 4, 2)
    prefill_window: PrefillTile = PrefillTile(64, 64, False, 4, 2)
    route_warps: int = 4  # of the router for many tokens

    @property
    def programs(self) -> int:
        """Returns how many programs fill the device."""
        return 2 * self.multiprocessors

    def decode_tile(self, rows: int, *, is_window: bool) -> Tile:
        return self.decode_few_window if is_window and rows <= 16 else self.decode

    def prefill_tile(self, *, is_window: bool) -> PrefillTile:
        return self.prefill_window if is_window else self.prefill

    def route(self, tokens: int) -> Tile:
        """Returns the tile of the router for many tokens; a program takes all experts."""
        return Tile(0, 16 if tokens <= 256 else 32, 64, self.route_warps, 3)

    def context_splits(self, rows: int, kv_heads: int, max_context: int) -> int:
        """Returns into how many parts decode attention splits the context: a power of two up to 64."""
        tiles = -(-max_context // self.decode.depth)
        splits = 1
        while splits < 64 and splits < tiles and rows * kv_heads * splits < self.programs:
            splits *= 2
        return splits

    def skinny_splits(self, tiles: int, steps: int) -> int:
        """Returns into how many parts to split a contraction of ``steps`` tiles, each part with work."""
        wanted = max(1, min(steps, self.programs // tiles))
        each = -(-steps // wanted)
        return -(-steps // each)

    def route_slices(self, tiles: int) -> int:
        """Returns into how many programs to split the hidden size; split tiles need an arrival counter."""
        if tiles > MOST_ARRIVALS:
            return 1
        return max(1, min(15, self.programs // tiles))


KIB = 1024
H200 = ArchTuning(132, 228 * KIB)
# By the compilers' names. All but the H200's follow from its table, the hardware's sizes and the compiler
# (two programs of every kernel fit a multiprocessor, at most two registers are spilled) and were never run.
ARCH_TUNINGS = {
    "sm_80": ArchTuning(  # A100: converts e4m3 in integers; paired tiles do not fit its registers
        108,
        164 * KIB,
        prefill=PrefillTile(64, 64, False, 4, 2),
    ),
    "sm_90": H200,
    "sm_100": ArchTuning(148, 228 * KIB),  # B200
    "gfx942": ArchTuning(  # MI300X, MI325X: a quarter of the shared memory, so fewer steps ahead
        304,
        64 * KIB,
        skinny=Tile(64, 16, 128, 4, 2),
        skinny_head=Tile(64, 16, 128, 4, 2),
        prefill=PrefillTile(64, 64, False, 4, 2),
    ),
    "gfx950": ArchTuning(256, 160 * KIB),  # MI350X, MI355X
    # R9700: HIP counts its 64 compute units as 32 multiprocessors. Waves have 32 threads: the shapes of the
    # others would spill up to 293 registers.
    "gfx1201": ArchTuning(
        32,
        128 * KIB,
        decode=Tile(0, 1, 64, 4, 3),
        decode_few_window=Tile(0, 1, 64, 4, 2),
        prefill=PrefillTile(64, 64, False, 8, 2),
        prefill_window=PrefillTile(64, 64, False, 8, 2),
        route_warps=8,
    ),
}


def wave_size(architecture: str) -> int:
    """Returns the threads of a wave (a warp) of ``gfxXYZ``: 64 of CDNA (gfx9), 32 of RDNA (from gfx10 on)."""
    return 64 if architecture.startswith("gfx9") else 32


def arch_tuning(architecture: str, multiprocessors: int) -> ArchTuning:
    """The table of ``sm_XY`` or ``gfxXYZ``, or the least demanding one of its family."""
    least = "gfx942" if architecture.startswith("gfx9") else "gfx1201"
    if architecture.startswith("sm_"):  # 12.0 has less shared memory than even an A100, not a B200's
        least = "sm_100" if architecture.startswith("sm_10") else "sm_80"
    found = ARCH_TUNINGS.get(architecture, ARCH_TUNINGS[least])
    return replace(found, multiprocessors=multiprocessors)


GEMV_TOKENS = 256  # up to here the streaming expert products, if an expert gets no more pairs than this:
GEMV_PAIRS_EACH = 12  # on average; fewer where grouped_moe can be used (``grouped_from``)
DIRECT_TOKENS = 16  # up to here their columns are the tokens as they come; above, pairs sorted by expert


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """A streaming expert product: the shares of a warp and of a program."""

    tiles: int  # row tiles (of 16) a warp
    columns: int  # inputs / 8
    num_warps: int
    group: int  # chunks of 64 columns that are loaded together, at most
    groups: int  # in flight
    splits: int  # parts of the contraction, if they divide its chunks


SHARE_CHUNKS = 23  # of the intermediate size: what one of two ranks has, or fewer


def gemv_gate_up(tokens: int, pairs_each: float, chunks: int = 45) -> GemvConfig:
    """``pairs_each``: the mean over all experts; ``chunks``: of their intermediate size. Measured on an H200:
    see also ``gemv_down``."""
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
    """Tokens of a grouped tile: 16, 32 or 64, by the mean number of pairs an expert."""
    mean = num_pairs / num_experts
    return 16 if mean <= 16 else 32 if mean <= 48 else 64


def grouped_from(num_experts: int, *, fp8: bool) -> int:
    """Pairs an expert beyond which ``grouped_moe`` is used where it can be. Sustained, microseconds a layer,
    uneven routing, ``gemv_moe`` and ``grouped_moe``: 32 experts, 24 tokens (3 pairs) 117 and 117, 32 tokens
    128 and 118, 48 140 and 123; 128 experts, 64 tokens (2 pairs) 398 and 407, 96 444 and 437, 128 469 and
    442. In e4m3, few keep their inputs in bfloat16: 11, or as many as the streaming products take at most
    (``GEMV_TOKENS`` of 128 experts: 8)."""
    return min(11, GEMV_TOKENS * 4 // num_experts) if fp8 else 3


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """Shape of a tile of ``grouped_moe``: pairs of a wide and of a narrow tile, and steps fetched ahead.

    ``tail``: additional pairs that a wide tile may take as a second product of the same decoded weights, a
    power of two or 0. ``mid``: pairs of a third kind of tile, for the remainder, or 0; unused with a tail.
    ``warps`` that compute make 16 weight rows each, ``units`` times in a step. ``overlap``: a chunk's product
    is in flight while the next chunk is decoded, which takes separate registers for its operand.
    """

    wide: int
    narrow: int
    num_stages: int
    registers: int = 0  # a thread at launch, if fewer than the compiler would take
    programs: int = 1  # on one multiprocessor
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
        """Returns a program's number of weight-row blocks for ``columns``: gate_up makes one of two rows.

        A checkpoint may have fewer rows: down reads whole chunks of gate_up's columns, so all are written."""
        rows = columns * 2 if is_gate_up else columns
        return -(-rows // (16 * self.warps * self.units))

    @property
    def most_left_out(self) -> int:
        """Returns how many places of an expert's last tile may have no pair."""
        rest = self.wide - self.middle - self.narrow
        return max(self.tail, self.narrow, self.middle - self.narrow, rest) - 1


def grouped(pairs_each: float, num_experts: int, *, fp8: bool = False) -> GroupedTile:
    """Returns the tile for the mean number of pairs an expert, and for e4m3 inputs.

    Microseconds a layer, sustained (docs/lab/kernels.md)."""
    if fp8:
        return _grouped_fp8(pairs_each)
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


def _grouped_fp8(pairs_each: float) -> GroupedTile:
    if pairs_each <= 48:
        return GroupedTile(64, 32, 8)
    if pairs_each <= 176:
        return GroupedTile(128, 32, 7, tail=32)
    return GroupedTile(256, 64, 5, tail=32)  # 120b, 8,192: 2,505, without a tail 2,530


PERMUTE_AT_ONCE = 2048  # pairs of tiles that one kernel compares all with all; above, two count and place
PERMUTE_PROGRAMS = 128  # that place pairs: one for each multiprocessor, if their blocks allow

# The all-reduce (kernels/triton/reduce): measured on 2 GPUs, predicted for more (docs/lab/kernels.md).
REDUCE_FLAGS = 512  # programs of a two-shot call at most
REDUCE_WIDE_ROWS = 16  # up to here ranks send float32: few bytes, and the sum is as good as one rank's
# A one-shot call without a norm: rows up to which each is divided among programs, of so many lanes of eight
# columns (at least one warp).
REDUCE_SPLIT_ROWS = 64
REDUCE_LANES = 32
PREFETCH_PROGRAMS = 128  # of a one-shot call that fetches weights into the L2
# Of a round of the search for a filter's threshold: four times what an H200 runs at once.
ROUND_PROGRAMS = 2112


def one_shot_rows(ranks: int) -> int:
    """Rows up to which every rank sums all rows; above, each sums and norms its own for all."""
    return {2: 1024, 4: 96, 8: 32}[ranks]


def reduce_few() -> Tile:
    """A one-shot call; ``rows`` of a program. 16 warps: a thread has eight columns and waits once."""
    return Tile(1, 1, 0, 16, 1)


def reduce_many() -> Tile:
    """A two-shot call; ``rows`` that a program has on their way at once."""
    return Tile(1, 1, 0, 16, 1)


def reduce_programs(rows: int) -> int:
    """Programs of a two-shot call in which a rank owns ``rows``: two fit a multiprocessor with 64 registers a
    thread (2 ranks), one with more."""
    return min(rows, 256)
