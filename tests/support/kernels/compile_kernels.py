"""Compile every kernel, in its variants, for GPUs that need not be here. A script: needs Triton, no GPU.

    python -m tests.support.kernels.compile_kernels [-v] cuda:90 ["gate_up 16" ...] [hip:gfx942 ...]

With names behind a target: those only; with "each": the first form of every kernel. With -v: shared memory of
each. Run by ``test_compiles.py``.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from chorale.engine.types import EARLY_STOPS
from chorale.kernels.triton import pages, tuning
from chorale.kernels.triton.attention import decode as attention
from chorale.kernels.triton.attention import prefill
from chorale.kernels.triton.dense import draft, draft_fused, linear, norm, qkv, skinny, skinny_fused
from chorale.kernels.triton.moe import (
    combine,
    gemv,
    grouped,
    hopper_kernel,
    moe,
    router,
    sort,
    tiles,
)
from chorale.kernels.triton.reduce import choices, one_shot, two_shot
from chorale.kernels.triton.sampling import (
    decode_inputs,
    draft_steps,
    sample,
    shared_sample,
    thresholds,
)
from tests.support.kernels.hazards import disassemble, overwritten

HEADS = {"NUM_Q": 64, "NUM_KV": 8, "D": 64, "KV_BLOCK": 64}
FLOATS = {"eps", "scale", "limit", "alpha", "fixed"}
TYPES = {"ids_ptr": "*i64", "index_ptr": "*i64", "slots_ptr": "*i64"}
INT32 = {
    "counts_ptr",
    "place_ptr",
    "tiles_ptr",
    "table_ptr",
    "context_ptr",
    "start_ptr",
    "order_ptr",
    "offsets_ptr",
    "blocks_ptr",
}
BYTES = {"scales_ptr"}
SOME_EXPERTS = {"first_expert", "num_experts", "pair_ids_ptr"}  # None, unless a rank has whole experts
WIDE = {"norm_ptr", "rope_ptr", "sinks_ptr", "part_ptr", "parts_ptr", "stat_ptr", "gates_ptr", "logits_ptr"}

# Registers a thread, of one kernel: gate_up of 9 to 16 tokens, which is ahead all the same (Triton 3.6).
MOST_SPILLED = 5
Variant = tuple[str, Any, dict[str, Any], dict[str, str], int, int]


def variants(arch: tuning.ArchTuning, asm: bool, hopper: bool) -> list[Variant]:
    """(name, kernel, constants, types that differ, warps, stages), all in bfloat16 at 20b's sizes."""
    whole = {"HEADS": 16, "H": 2880, "SPLITS": 0, "BLOCK": 4096, "SCALED": True}
    found: list[Variant] = [
        (
            "norm",
            norm._norm_kernel,
            {"INDEXED": True, "BLOCK": 4096, "PDL": hopper},
            {"x_ptr": "*fp32"},
            8,
            3,
        ),
        ("rotate", qkv._rotate_kernel, {**HEADS, **whole, "PDL": hopper}, {"x_ptr": "*fp32"}, 4, 3),
        (
            "rotate parts",
            qkv._rotate_kernel,
            {**HEADS, **whole, "HEADS": tuning.rotate_heads(16), "SPLITS": 5, "PDL": hopper},
            {"x_ptr": "*fp32", "qkv_ptr": "*fp32"},
            4,
            3,
        ),
        ("sort", sort._sort_kernel, {"E": 32, "EXPERTS": 32, "CHUNK": 128}, {}, 8, 3),
        ("rank", sort._rank_kernel, {"PAIRS": 256, "PART": 16, "PDL": hopper}, {}, 4, 3),
        ("shuffle_inputs", moe._shuffle_kernel, {"BLOCK": 1024}, {"x_ptr": "*fp32"}, 4, 3),
        ("join", attention._join_kernel, {"NUM_Q": 64, "D": 64, "SPLITS": 16, "PDL": hopper}, {}, 1, 3),
    ]
    found += _one_token(arch, hopper) + _add_norm(hopper) + _sums(hopper) + _draft_head(arch, hopper)
    for tokens in (256, 8192):
        tile = arch.route(tokens)
        sizes = {"TOKENS": tile.tokens, "DEPTH": tile.depth, "STAGES": tile.num_stages, "SLICES": 8}
        exact = {"PRECISION": "tf32x3" if asm else "ieee", "PDL": hopper}
        constants = {"E": 32, "K": 4, "EXPERTS": 32, **sizes, **exact}
        types = {"x_ptr": "*fp32", "w_ptr": "*fp32", "b_ptr": "*fp32"}
        types |= {"squares_ptr": "*fp32", "arrivals_ptr": "*i32"}
        for kind in ("fp32", "bf16"):
            name = f"route {tile.tokens} {kind}"
            mine = types | {"w_ptr": f"*{kind}"}
            found.append((name, router._many_kernel, constants, mine, tile.num_warps, 3))
    for window in (0, 128):
        constants, tile = {**HEADS, "WINDOW": window}, arch.decode_tile(1, is_window=window > 0)
        decode = {"SPLITS": 1 if window else 16, "ROWS": 16, "KEYS": tile.depth, "PDL": hopper}
        name, warps, stages = f"decode {window}", tile.num_warps, tile.num_stages
        found.append((name, attention._decode_kernel, constants | decode, {}, warps, stages))
        many = arch.prefill_tile(is_window=window > 0)
        sizes = {"GROUP": 8, "TOKENS": many.rows // 8, "KEYS": many.keys, "PAIRS": many.pairs}
        constants |= sizes | {"STAGES": many.num_stages}
        found.append((f"prefill {window}", prefill._prefill_kernel, constants, {}, many.num_warps, 3))
    for each in (1, 16, 32, 64):
        constants = {"E": 32, "EXPERTS": 32, "TOKENS": each, "SORTED": each > 1, "BF16": True, "ASM": asm}
        tile = tuning.expert_tile(each)
        sizes = {"TILES": tile.rows // 16, "STAGES": tile.num_stages}
        found.append(
            (f"gate_up {each}", moe._gate_up_kernel, {**constants, **sizes, "K": 4}, {}, tile.num_warps, 3)
        )
        types = {"out_ptr": "*fp32"}
        found.append((f"down {each}", moe._down_kernel, {**constants, **sizes}, types, tile.num_warps, 3))
    return found


def _one_token(arch: tuning.ArchTuning, hopper: bool) -> list[Variant]:
    resident = {"HAS_BIAS": True, "ADD": True, "K": 4096, "CHUNK": 1024, "PDL": hopper}
    tile, head, pair = tuning.output_row(), tuning.head_row(), tuning.qkv_row()
    gemv = {"ROWS": head.rows, "DEPTH": head.depth, "STAGES": head.num_stages, "PDL": hopper, "ADD": False}
    one = {**HEADS, "H": 2880, "PAIRS": pair.rows, "CHUNK": 1024, "PDL": hopper}
    choice = {"E": 32, "K": 4, "EXPERTS": 32, "EACH": 1, "ADD": False, "BLOCK": 4096, "PDL": hopper}
    wide = dict.fromkeys(("x_ptr", "sum_ptr", "w_ptr", "b_ptr"), "*fp32") | {"arrivals_ptr": "*i32"}
    out = {"out_ptr": "*fp32"}
    chosen = {"E": 32, "K": 4, "EXPERTS": 32, "TOKENS": 16, "PDL": hopper}
    tile16, head16 = arch.skinny, arch.skinny_head
    part = {"K": 2880, "NORM": True, "ROWS": tile16.rows, "TOKENS": tile16.tokens, "DEPTH": tile16.depth}
    part |= {"SPLITS": 5, "STAGES": tile16.num_stages, "PDL": hopper}
    add = {"HAS_BIAS": True, "SPLITS": 8, "BLOCK": tuning.ADD_COLUMNS, "PDL": hopper}
    whole_head = part | {"NORM": False, "DEPTH": head16.depth, "SPLITS": 1, "STAGES": head16.num_stages}
    return [
        ("skinny head", skinny._part_kernel, whole_head, {}, head16.num_warps, 3),
        ("skinny", skinny._part_kernel, part, {"x_ptr": "*fp32"}, tile16.num_warps, 3),
        ("add", skinny._add_kernel, add, {"residual_ptr": "*fp32"}, 1, 3),
        ("output", linear._resident_kernel, resident | {"ROWS": tile.rows}, out, tile.num_warps, 3),
        ("head", linear._gemv_kernel, gemv, out, head.num_warps, 3),
        ("qkv", qkv._one_kernel, one, {"x_ptr": "*fp32"}, pair.num_warps, 3),
        (
            "choose",
            router._choose_kernel,
            chosen,
            {"both_ptr": "*fp32", "low_ptr": "*fp32", "b_ptr": "*fp32"},
            4,
            3,
        ),
        ("route", router._few_kernel, choice, wide, 8, 3),
        ("route, added", router._few_kernel, choice | {"EACH": 4, "ADD": True}, wide, 8, 3),
    ]


def _draft_head(arch: tuning.ArchTuning, hopper: bool) -> list[Variant]:
    """A head of the published size: products of one token and of a few, and what is between them."""
    stream, gated, few = tuning.stream_row(), tuning.gated_row(), arch.skinny
    row = {"ROWS": stream.rows, "DEPTH": stream.depth, "STAGES": stream.num_stages, "PDL": hopper}
    part = {"K": 5760, "NORM": False, "ROWS": few.rows, "TOKENS": few.tokens, "DEPTH": few.depth}
    part |= {"SPLITS": 4, "STAGES": few.num_stages, "PDL": hopper}
    rotate = {**HEADS, "HEADS": 4, "H": 1, "BLOCK": 1, "SCALED": False, "PDL": hopper}
    out, fp32 = {"out_ptr": "*fp32"}, {"x_ptr": "*fp32"}
    wide = {"qkv_ptr": "*fp32", "x_ptr": "*fp32"}
    pair = dict.fromkeys(("states_ptr", "token_norm_ptr", "state_norm_ptr", "residual_ptr"), "*fp32")
    pair |= {"ids_ptr": "*i64"}
    found: list[Variant] = [
        ("draft norm", norm._norm_parts_kernel, {"BLOCK": 16384, "PDL": hopper}, fp32, 16, 3),
        ("draft norm fp32", norm._norm_parts_kernel, {"BLOCK": 4096, "PDL": hopper}, fp32 | out, 8, 3),
        (
            "draft gated",
            draft._gated_row_kernel,
            {"H": 2880, "ROWS": gated.rows, "CHUNK": 1024, "PDL": hopper},
            fp32,
            gated.num_warps,
            3,
        ),
        ("draft silu", draft._silu_kernel, {"BLOCK": 1024, "PDL": hopper}, {"y_ptr": "*fp32"}, 4, 3),
        ("draft parts", skinny._part_kernel, part, {}, few.num_warps, 3),
        ("draft rotate", qkv._rotate_kernel, rotate | {"SPLITS": 1}, wide, 4, 3),
        ("draft rotate parts", qkv._rotate_kernel, rotate | {"SPLITS": 4}, wide, 4, 3),
        ("draft rotate whole", qkv._rotate_kernel, rotate | {"SPLITS": 0, "HEADS": 16}, fp32, 4, 3),
    ]
    for adds in (False, True):
        name = "draft row, added" if adds else "draft row"
        found.append((name, linear._gemv_kernel, row | {"ADD": adds}, out, stream.num_warps, 3))
    for keeps in (False, True):
        constants = {"KEEPS_NORMED": keeps, "BLOCK": 4096, "PDL": hopper}
        name = "draft pair, normed" if keeps else "draft pair"
        found.append((name, draft._pair_kernel, constants, pair, 8, 3))
    return found


def _add_norm(hopper: bool) -> list[Variant]:
    """Products of cuBLAS, in what their weights are in, and parts of a split product."""
    once = {"SPLITS": 1, "HAS_BIAS": False, "LOW": False, "BLOCK": 4096, "PDL": hopper}
    split = once | {"SPLITS": 5, "HAS_BIAS": True}
    fp32, warps = {"x_ptr": "*fp32"}, tuning.ADD_NORM_WARPS
    parts = fp32 | {"y_ptr": "*fp32"}
    plain = parts | {"high_ptr": "*fp32", "low_ptr": "*fp32"}
    return [
        ("add norm", norm._add_norm_kernel, once, fp32, warps, 3),
        ("add norm halves", norm._add_norm_kernel, once | {"LOW": True}, fp32, warps, 3),
        ("add norm parts", norm._add_norm_kernel, split, parts, warps, 3),
        ("add norm fp32", norm._add_norm_kernel, once, plain, warps, 3),
    ]


def skinny_variants() -> list[Variant]:
    """Hopper and later."""
    found: list[Variant] = []
    for tokens in (4, 8):
        qkv_tile, output_tile = tuning.skinny_qkv(tokens), tuning.skinny_output(tokens)
        if qkv_tile is not None:
            sizes = skinny_fused.constants_of(skinny_fused.product_of(qkv_tile, tokens, 2880, 64, True))
            warps = sizes["num_warps"]
            sizes = {**HEADS, "H": 2880} | {k: v for k, v in sizes.items() if k != "num_warps"}
            types = {"x_ptr": "*fp32"}
            found.append((f"skinny qkv {tokens}", skinny_fused._qkv_kernel, sizes, types, warps, 3))
        if output_tile is not None:
            sizes = skinny_fused.constants_of(skinny_fused.product_of(output_tile, tokens, 4096, 0, True))
            warps = sizes["num_warps"]
            sizes = {"K": 4096, "HAS_BIAS": True} | {k: v for k, v in sizes.items() if k != "num_warps"}
            types = {"residual_ptr": "*fp32"}
            found.append((f"skinny output {tokens}", skinny_fused._project_kernel, sizes, types, warps, 3))
    return found + [found_one for tokens in (1, 4, 8) for found_one in fused_draft_variants(tokens)]


def fused_draft_variants(tokens: int) -> list[Variant]:
    """A draft head's products in one kernel each."""
    found: list[Variant] = []

    def add(name: str, kernel: Any, product: Any, sizes: dict[str, Any], types: dict[str, str]) -> None:
        constants = skinny_fused.constants_of(product)
        warps = constants["num_warps"]
        rest = {key: value for key, value in constants.items() if key != "num_warps"}
        found.append((f"{name} {tokens}", kernel, sizes | rest, types, warps, 3))

    if (tile := tuning.draft_qkv(tokens)) is not None:
        product = replace(skinny_fused.product_of(tile, tokens, 5760, 64, True), norm=False)
        add("draft qkv", draft_fused._qkv_kernel, product, {**HEADS, "K": 5760}, {})
    if (tile := tuning.draft_gated(tokens)) is not None:
        product = replace(skinny_fused.product_of(tile, tokens, 2880, 0, True), norm=True, early="")
        add("draft gated", draft_fused._gated_kernel, product, {"H": 2880}, {"x_ptr": "*fp32"})
    if (tile := tuning.draft_down(tokens)) is not None:
        product = skinny_fused.product_of(tile, tokens, 17280, 0, True)
        sizes = {"K": 17280, "HAS_BIAS": False}
        add("draft down", skinny_fused._project_kernel, product, sizes, {"residual_ptr": "*fp32"})
    return found


def _sums(hopper: bool) -> list[Variant]:
    """What ends the expert layer: columns of a token, or a whole row and its norm."""
    many = {"K": 4, "SPLITS": 1, "SOME": False, "NORM": False, "ADD": True, "BLOCK": 1024, "PDL": hopper}
    many_normed = many | {"NORM": True, "BLOCK": 4096}
    few = {"place_ptr": None, "gates_ptr": None}
    plain, normed = many | few, many_normed | few
    fp32, warps = {"x_ptr": "*fp32"}, tuning.ADD_NORM_WARPS
    large, wide = fp32 | {"parts_ptr": "*bf16"}, fp32 | {"normed_ptr": "*fp32"}
    return [
        ("sum", combine._sum_kernel, plain, wide, 4, 3),
        ("sum norm", combine._sum_kernel, normed, fp32, warps, 3),
        ("sum norm fp32", combine._sum_kernel, normed, wide, warps, 3),
        ("combine", combine._sum_kernel, many, large, tuning.COMBINE_WARPS, 3),
        (
            "combined",
            combine._sum_kernel,
            many | {"ADD": False},
            large | {"x_ptr": "*bf16"},
            tuning.COMBINE_WARPS,
            3,
        ),
        ("combine norm", combine._sum_kernel, many_normed, large, tuning.COMBINE_WARPS, 3),
        ("combine norm fp32", combine._sum_kernel, many_normed, large | wide, tuning.COMBINE_WARPS, 3),
    ]


def over_ranks(asm: bool, hopper: bool) -> list[Variant]:
    """The all-reduce, with what follows it: float32 words of few rows, bfloat16 ones of more."""
    types = dict.fromkeys(("x_ptr", "sum_ptr", "w_ptr", "router_b_ptr"), "*fp32")
    types |= {"peers_ptr": "*i64", "calls_ptr": "*i32", "arrivals_ptr": "*i32", "status": "i64"}
    types |= dict.fromkeys(("next_address", "next_bytes", "words", "normed_at", "whole_at"), "i64")
    common = {"H": 2880, "LANES": 512, "ASM": asm, "PDL": hopper}
    few = common | {"SPLITS": 4, "HAS_BIAS": False, "WIDE": True}
    many = common | {"SPLITS": 1, "HAS_BIAS": True, "WIDE": False}
    rows = {"NORM": True, "PREFETCH": False, "BLOCKS": 1, "COUNTERS": 16, "K": 0}
    few_lanes = {"NORM": False, "BLOCKS": 12, "LANES": tuning.REDUCE_LANES, "SPLITS": 20}
    ids = types | dict.fromkeys(("ids_ptr", "own_ids_ptr"), "*i64")
    ids |= dict.fromkeys(("gates_ptr", "own_gates_ptr"), "*fp32")
    shared = common | {"K": 4, "COUNTERS": 16}
    scattered = many | {"NORM": True, "NORM_WIDE": False, "LOW": True, "WHOLE": False, "HAS_BIAS": False}
    scattered |= {"FLAGS": tuning.REDUCE_FLAGS}
    parts, once = types | {"y_ptr": "*fp32"}, tuning.reduce_few()
    found: list[Variant] = []
    for ranks in (2, 4, 8):
        few["N"] = many["N"] = scattered["N"] = ranks
        each, tile = rows | {"ROWS": once.rows}, tuning.reduce_many()
        found += [
            (f"reduce {ranks}", one_shot._rows_kernel, few | each, parts, once.num_warps, 3),
            (f"reduce many {ranks}", one_shot._rows_kernel, many | each, types, once.num_warps, 3),
            (f"reduce columns {ranks}", one_shot._rows_kernel, few | each | few_lanes, parts, 1, 3),
            (f"reduce choices {ranks}", choices._choices_kernel, shared | {"N": ranks}, ids, 16, 3),
            (
                f"scatter {ranks}",
                two_shot._scattered_kernel,
                scattered | {"ROWS": tile.rows},
                types,
                tile.num_warps,
                3,
            ),
        ]
        some = {"pair_ids_ptr": "*i64", "first_expert": "i32", "num_experts": "i32"}
        whole, rows_of_some = few | each | {"K": 4}, parts | some
        lanes = whole | few_lanes
        found += [
            (f"reduce {ranks} of some", one_shot._rows_kernel, whole, rows_of_some, once.num_warps, 3),
            (f"reduce columns {ranks} of some", one_shot._rows_kernel, lanes, rows_of_some, 1, 3),
        ]
    if hopper:
        ahead = few | rows | {"ROWS": once.rows, "PREFETCH": True}
        found.append(("reduce ahead", one_shot._rows_kernel, ahead, parts, once.num_warps, 3))
    last = scattered | {"NORM": False, "LOW": False, "WHOLE": True, "ROWS": tuning.reduce_many().rows}
    found.append(("scatter last", two_shot._scattered_kernel, last, types, 16, 3))
    return found


def streaming(hopper: bool) -> list[Variant]:
    """NVIDIA only: their loops are PTX."""
    found: list[Variant] = skinny_variants() if hopper else []
    for tokens in (1, 2, 8, 16, 64):
        direct = tokens <= tuning.DIRECT_TOKENS
        constants = {"K": 4, "PAIRS": 64 if direct and tokens > 1 else 0, "BY_PAIR": direct}
        constants |= {"SORTED": not direct, "EXPERTS": 128}
        up, down = tuning.gemv_gate_up(tokens, tokens / 8), tuning.gemv_down(tokens, tokens / 8)
        sizes = gemv.constants_of(up, wait=False) | {"PDL": hopper}
        warps = sizes.pop("num_warps")
        found.append((f"stream up {tokens}", gemv._gate_up_kernel, {**constants, **sizes}, {}, warps, 3))
        for chunks in (45, 23, 22, 11):  # of one rank, of two, of four
            split = gemv.split_of(down, chunks)
            fitted = replace(down, group=split.group, groups=min(down.groups, split.groups))
            sizes = gemv.constants_of(fitted, wait=hopper) | {"SPLITS": split.splits}
            sizes |= gemv.tail_constants(fitted, split)
            warps, types = sizes.pop("num_warps"), {"out_ptr": "*fp32"}
            name = f"stream down {tokens}, {chunks} chunks"
            found.append((name, gemv._down_kernel, {**constants, **sizes}, types, warps, 3))
    return found


def around_the_model(asm: bool, hopper: bool) -> list[Variant]:
    """The inputs of a decode step, filters and sampling."""
    numbers = dict.fromkeys(
        ("rows_ptr", "computed_ptr", "new_token_ptr", "new_block_ptr", "row_tables_ptr", "keys_ptr"), "*i32"
    )
    wide = dict.fromkeys(("last_ptr", "position_ptr", "slot_ptr"), "*i64")
    floats = dict.fromkeys(("temperature_ptr", "filters_ptr", "best_ptr", "edge_ptr", "most_ptr"), "*fp32")
    masks = {"forbidden_ptr": "*u8", "index_ptr": "*i32", "octets_ptr": "*u8", "stops_ptr": "*i32"}
    types = numbers | wide | floats | masks
    found = choices_and_thresholds(asm, hopper, types)
    inputs, chosen = types | {"token_ptr": "*i64"}, types | {"token_ptr": "*i32", "out_ptr": "*i64"}
    found += [
        ("decodes", decode_inputs._decode_inputs_kernel, {"KV_BLOCK": 64, "BLOCK": 64}, inputs, 1, 3),
        *_steps_with_drafts(types),
        *_pages(),
        (
            "rows",
            sample._rows_kernel,
            {"PIECES": 256, "ids_ptr": None},
            types | {"token_ptr": "*i32", "out_ptr": "*i64"},
            1,
            3,
        ),
        ("rows of a draft", sample._rows_kernel, {"PIECES": 32}, chosen | {"ids_ptr": "*i64"}, 1, 3),
    ]
    for filtered in (False, True):
        constants = {
            "BLOCK": 1024,
            "BLOCKS": 8,
            "FILTERED": filtered,
            "MASKED": filtered,
            "STOPS": EARLY_STOPS,
        }
        constants |= {"ASM": asm}
        for name, first in ((f"pieces {filtered}", 0), (f"pieces {filtered} of the second rank", 100544)):
            each = constants | {"FIRST": first, "ids_ptr": None}
            found.append((name, sample._pieces_kernel, each, chosen, 4, 3))
        by_id, ids = constants | {"FIRST": 0}, {"ids_ptr": "*i64"}
        found.append((f"pieces {filtered} of a draft", sample._pieces_kernel, by_id, chosen | ids, 4, 3))
    return found


def _pages() -> list[Any]:
    """Copies of 120b's pages of 64 tokens, 8 bytes at a time."""
    sizes = {"FIRST": 0, "WIDTH": 16384, "PAGE": 18 * 16384, "PART": pages.PART, "BLOCK": pages.BLOCK}
    types = {"address_ptr": "*i64", "pages_ptr": "*i64"}
    return [
        (name, pages._pages_kernel, sizes | {"IS_GATHER": is_gather}, types, 4, 3)
        for name, is_gather in (("gather pages", True), ("scatter pages", False))
    ]


def _steps_with_drafts(types: dict[str, str]) -> list[Any]:
    numbers = (
        "num_drafts_ptr",
        "given_ptr",
        "first_new_ptr",
        "stops_ptr",
        "context_ptr",
        "table_ptr",
        "key_ptr",
    )
    wide = (
        *("last_position_ptr", "drafts_ptr", "key_base_ptr", "may_stop_ptr", "token_ptr", "sample_ptr"),
        *("kept_ptr", "following_ptr", "last_place_ptr"),
    )
    floats = ("floats_ptr", "temperature_ptr", "filter_ptr", "profile_ptr")
    types = types | dict.fromkeys(numbers, "*i32") | {"early_ptr": "*i32"}
    types |= dict.fromkeys(wide, "*i64") | dict.fromkeys(floats, "*fp32")
    sizes = {"KV_BLOCK": 64, "BLOCK": 64}
    inputs, passes = sizes | {"PLACES": 4, "STOPS": EARLY_STOPS}, sizes | {"PASSES": 3}
    found = [
        ("verifies", draft_steps._verify_inputs_kernel, inputs, types, 1, 3),
        ("passes", draft_steps._draft_passes_kernel, passes, types, 1, 3),
    ]
    for has_profile in (False, True):
        accepts = {"PLACES": 4, "HAS_PROFILE": has_profile}
        found.append(("accepts", draft_steps._accept_kernel, accepts, types, 1, 3))
    return found


def choices_and_thresholds(asm: bool, hopper: bool, types: dict[str, str]) -> list[Variant]:
    module, found = thresholds, list[Variant]()
    types = types | dict.fromkeys(("values_ptr", "parts_ptr", "own_ptr", "all_ptr"), "*fp32")
    types |= {"state_ptr": "*i64", "arrivals_ptr": "*i32", "peers_ptr": "*i64", "calls_ptr": "*i32"}
    types |= {"status": "i64", "column_ptr": "*i32", "out_ptr": "*i64"}
    last = {"ASM": asm, "PDL": hopper, "THREADS": 32 * module.WARPS}
    common = {"BLOCK": module.BLOCK, "BLOCKS": module.BLOCKS, "PIECES": 64, "FIRST": 100544, **last}
    for ranks in (1, 2, 4, 8):
        masked = ranks <= 2
        each = common | {"N": ranks, "MASKED": masked, "STOPS": EARLY_STOPS if masked else 0}
        for start in (False, True):
            constants = each | {"START": start, "SWAP": ranks > 1}
            name = f"{'start' if start else 'round'} {ranks}"
            found.append((name, module._round_kernel, constants, types, module.WARPS, 3))
        if ranks > 1:
            choice = last | {"PIECES": 128, "N": ranks}
            found.append((f"choose {ranks}", shared_sample._choose_kernel, choice, types, 4, 3))
    alone = each | {"START": False, "SWAP": False}
    found.append(("round by a library", module._round_kernel, alone, types, module.WARPS, 3))
    found.append(("conclude", module._conclude_kernel, {"START": False, "N": 2}, types, 1, 3))
    return found


def supports_fp8_kv(target: GPUTarget, found: list[Variant]) -> list[Variant]:
    """The kernels that touch blocks, with one byte a value: bytes where Triton has no such type."""
    native = target.backend == "cuda" and int(target.arch) >= 89
    types = {"kv_ptr": "*fp8e4nv" if native else "*u8"}
    touching = ("qkv", "rotate", "draft rotate", "decode 0", "decode 128", "prefill 0", "prefill 128")
    return [(f"{v[0]} fp8", v[1], v[2], v[3] | types, v[4], v[5]) for v in found if v[0] in touching]


def of_some_experts(found: list[Variant]) -> list[Variant]:
    """The kernels that know which experts a rank has, if these are not all."""
    types = {"first_expert": "i32", "num_experts": "i32", "pair_ids_ptr": "*i64"}
    by_place = {"combine", "gather", "gather8"}
    touched = {"sort", "rank", "gate_up 1", "down 1", "gate_up 64", "down 64", "sum", "place", "place few"}
    touched |= {"count", *(f"stream up {n}" for n in (1, 2, 8, 16))}
    touched |= {f"stream down {n}, 45 chunks" for n in (1, 2, 8, 16)}
    more = [(f"{v[0]} of some", v[1], v[2], v[3] | types, v[4], v[5]) for v in found if v[0] in touched]
    some = {"SOME": True}
    return more + [(f"{v[0]} of some", v[1], v[2] | some, *v[3:]) for v in found if v[0] in by_place]


def large() -> list[Variant]:
    """``grouped_moe``'s own kernels, for Hopper."""
    cut = {"WIDE": 256, "MID": 0, "NARROW": 64, "TAIL": 0}
    placing = cut | {"EXPERTS": 128, "LISTERS": 4, "PDL": True}
    few, many = placing | {"PAIRS": 1024, "PART": 8}, placing | {"GROUP": 1024, "BLOCK": 256}
    mids = {"MID": 128}
    rows = cut | {"K": 4, "BLOCK": 1024, "FIXED": False, "SOME": False, "PDL": True}
    plain = rows | {"scale_ptr": None, "fixed": None}
    types = {"out_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    fixed = rows | {"BLOCK": 4096, "FIXED": True}
    return [
        ("count", tiles._count_kernel, {"EXPERTS": 128, "GROUP": 1024, "PDL": True}, {}, 8, 3),
        ("place few", tiles._permute_few_kernel, few | {"TAIL": 32}, {}, 8, 3),
        ("place few with mids", tiles._permute_few_kernel, few | mids, {}, 8, 3),
        ("place fewest", tiles._permute_few_kernel, few | {"PAIRS": 512, "EXPERTS": 32}, {}, 8, 3),
        ("place", tiles._permute_many_kernel, many | {"GROUP": 256, "BLOCK": 64}, {}, 8, 3),
        ("place with tails", tiles._permute_many_kernel, many | {"TAIL": 32}, {}, 8, 3),
        ("place with mids", tiles._permute_many_kernel, many | mids, {}, 8, 3),
        ("gather", grouped._gather_kernel, plain, {}, 4, 3),
        ("gather with mids", grouped._gather_kernel, plain | mids, {}, 4, 3),
        ("gather8", grouped._gather_kernel, fixed | {"FIXED": False}, types, 8, 3),
        ("gather8 with mids", grouped._gather_kernel, fixed | mids, types, 8, 3),
    ]


def compile_products(target: GPUTarget, verbose: bool) -> None:
    """``hopper_kernel``'s, which are Gluon: tensor descriptors in the signature."""
    kernel = hopper_kernel._product_kernel
    names = list(inspect.signature(kernel.fn).parameters)
    for tile, is_gate_up, fp8 in [
        *[(tuning.grouped(8, 32), is_gate_up, False) for is_gate_up in (True, False)],
        *[(tuning.grouped(8, 128), is_gate_up, False) for is_gate_up in (True, False)],
        (tuning.grouped(16, 128), True, False),
        (tuning.grouped(16, 32), True, False),
        (tuning.grouped(24, 32), True, False),
        (tuning.grouped(32, 32), True, False),
        *[(tuning.grouped(64, 32), is_gate_up, False) for is_gate_up in (True, False)],
        (tuning.grouped(128, 32), True, False),
        *[(tuning.grouped(1024, 32), is_gate_up, False) for is_gate_up in (True, False)],
        *[(tuning.grouped(each, 32, fp8=True), True, True) for each in (32, 128, 1024)],
        (tuning.grouped(1024, 32, fp8=True), False, True),
        (tuning.GroupedTile(16, 8, 2, 80, 3, tail=8, warps=4, units=5, overlap=False), True, False),
    ]:
        constants = {"WIDE": tile.wide, "MID": tile.middle, "NARROW": tile.narrow, "TAIL": tile.tail}
        constants |= {"STAGES": tile.num_stages, "GATE_UP": is_gate_up, "FP8": fp8}
        constants |= {"REST": hopper_kernel.rest_of_steps(45, fp8), "UNITS": tile.units, "PDL": True}
        constants |= {"OVERLAP": tile.overlap}
        other = tile.tail or tile.middle or tile.narrow
        width = "128" if fp8 else "64"
        layout = repr(NVMMASharedLayout(128, 8 if fp8 else 16))
        boxes = {
            "wide_desc": f"{'fp8e4nv' if fp8 else 'bf16'}[{tile.wide}, {width}],{layout}",
            "narrow_desc": f"{'fp8e4nv' if fp8 else 'bf16'}[{tile.narrow}, {width}],{layout}",
            "other_desc": f"{'fp8e4nv' if fp8 else 'bf16'}[{other}, {width}],{layout}",
            "blocks_desc": f"u8[{tile.warps}, 8, 128],{NVMMASharedLayout(128, 8, rank=3)!r}",
            "scales_desc": f"u8[8, 64],{NVMMASharedLayout(64, 8)!r}"
            if fp8
            else f"u16[8, 32],{NVMMASharedLayout(64, 16)!r}",
        }
        types = {name: f"tensordesc<{box}>" for name, box in boxes.items()}
        types |= {"largest_ptr": "*u8", "x_scale_ptr": "*fp32", "inner_scale": "fp32"}
        types |= {"out_ptr": "*fp8e4nv"} if fp8 and is_gate_up else {}
        plain = source(kernel, constants, types)
        places = {(names.index(name),): value for name, value in constants.items()}
        compiled = triton.compile(
            GluonASTSource(kernel, plain.signature, places, plain.attrs), target,
            {"num_warps": tile.warps} | ({"maxnreg": tile.registers} if tile.registers else {}),
        )  # fmt: skip
        # Of a multiprocessor's 228 KiB each program takes one more.
        room = 228 * 1024 // tile.programs - 1024
        assert compiled.metadata.shared <= room, (tile, compiled.metadata.shared)
        sass = disassemble(compiled.asm["cubin"])
        bad = overwritten(sass)
        assert not bad, (tile, fp8, bad[:5])
        if verbose:
            local = len(re.findall(r"\b(?:LDL|STL)\b", sass))
            shared = compiled.metadata.shared
            kind = f"{'gate_up' if is_gate_up else 'down'}{' e4m3' if fp8 else ''}"
            print(f"{target.arch} {kind} {tile} shared {shared:7} bytes, {local} local accesses", flush=True)


def source(kernel: Any, constants: dict[str, Any], types: dict[str, str]) -> ASTSource:
    signature, attributes = {}, {}
    names = list(inspect.signature(kernel.fn).parameters)
    constants = constants | dict.fromkeys(SOME_EXPERTS & set(names) - set(types))
    for place, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name) or type_of(name)
        # What a launch finds out: aligned pointers, and sizes that are multiples of 16.
        if name.endswith("_ptr") or name in ("H", "I", "N", "K", "E", "width"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)


def type_of(name: str) -> str:
    if name in FLOATS:
        return "fp32"
    if not name.endswith("_ptr"):
        return "i32"
    if name in TYPES:
        return TYPES[name]
    return "*i32" if name in INT32 else "*u8" if name in BYTES else "*fp32" if name in WIDE else "*bf16"


def target_of(text: str) -> GPUTarget:
    backend, arch = text.split(":")
    if backend == "cuda":
        return GPUTarget("cuda", int(arch), 32)
    return GPUTarget("hip", arch, tuning.wave_size(arch))


def spilled(compiled: Any) -> int:
    """Registers that a thread keeps in memory, or, for NVIDIA, stores to there."""
    if "cubin" in compiled.asm:
        cubin = compiled.asm["cubin"]
        return len(re.findall(r"\bSTL\b", disassemble(cubin))) if may_spill(cubin) else 0
    return int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", compiled.asm["amdgcn"])[-1])


def may_spill(cubin: bytes) -> bool:
    """Whether a thread has a frame in memory, which spilled registers need. Disassembling takes longer than
    compiling.

    The cubin's section .nv.info holds the frame's size: 0x04, EIATTR_FRAME_SIZE (0x11), two bytes of length,
    the symbol, the size. Other bytes that look so can only have a kernel disassembled that has no frame.
    """
    frames = re.findall(rb"\x04\x11\x08\x00.{4}(.{4})", cubin, re.DOTALL)
    return not frames or any(map(any, frames))


OVER_RANKS = (
    one_shot._rows_kernel,
    two_shot._scattered_kernel,
    choices._choices_kernel,
    thresholds._round_kernel,
    shared_sample._choose_kernel,
)


def check_over_ranks(kernel: Any, ptx: str) -> None:
    """Peers' memory is written and polled 16 bytes at a time, flags are released and acquired, and NVLink
    multicast is not used."""
    assert "st.relaxed.sys.global.v4.b32" in ptx
    polls = re.findall(r"ld\.relaxed\.sys\.global\.(\S+) \{", ptx)
    assert set(polls) == {"v4.b32"}, polls
    is_flagged = kernel is two_shot._scattered_kernel
    assert ("st.release.sys.global.b32" in ptx) == is_flagged
    assert ("ld.acquire.sys.global.b32" in ptx) == is_flagged
    assert "multimem" not in ptx


ONE_OF_EACH = "each"  # instead of names: the first form of every kernel


def compile_all(target: GPUTarget, wanted: list[str], verbose: bool) -> None:
    nvidia = target.backend == "cuda"
    hopper = nvidia and int(target.arch) >= 90
    arch = tuning.ARCH_TUNINGS[f"sm_{target.arch}" if nvidia else str(target.arch)]
    found = variants(arch, nvidia, hopper)
    found += over_ranks(nvidia, hopper)
    found += around_the_model(nvidia, hopper) + supports_fp8_kv(target, found)
    found += streaming(hopper) if nvidia else []
    found += large() if target.arch == 90 else []
    found += of_some_experts(found)
    if target.arch == 90 and (not wanted or "product" in wanted):
        compile_products(target, verbose)
    unknown = set(wanted) - {variant[0] for variant in found} - {ONE_OF_EACH, "product"}
    assert not unknown, f"no such kernels for {target}: {unknown}"
    compiled_once = set()
    for name, kernel, constants, types, warps, stages in found:
        if wanted and name not in wanted and (wanted != [ONE_OF_EACH] or kernel in compiled_once):
            continue
        compiled_once.add(kernel)
        compiled = triton.compile(
            source(kernel, constants, types), target, {"num_warps": warps, "num_stages": stages}
        )
        assert len(compiled.asm["cubin" if nvidia else "hsaco"]) > 1000, name
        assert 2 * compiled.metadata.shared <= arch.shared, f"{name}: two programs do not fit"
        assert spilled(compiled) <= MOST_SPILLED, f"{name}: {spilled(compiled)} registers do not fit"
        if kernel in OVER_RANKS and nvidia and constants.get("SWAP", True):
            check_over_ranks(kernel, compiled.asm["ptx"])
        if verbose:
            print(f"{target.arch} {name:12} shared {compiled.metadata.shared:7} bytes", flush=True)


def main(arguments: list[str]) -> None:
    wanted: dict[str, list[str]] = {}
    for text in arguments:
        if ":" in text:
            wanted[text] = []
        elif text != "-v":
            wanted[next(reversed(wanted))].append(text)
    for target, names in wanted.items():
        compile_all(target_of(target), names, "-v" in arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
