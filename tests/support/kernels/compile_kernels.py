"""A script that compiles every kernel of a server for a given GPU. Needs Triton, but no GPU.

    python -m tests.support.kernels.compile_kernels h200|a100|b200|mi300x|... [each | default | NAME ...] [-v]

It compiles the kernels that ``chorale warm`` finds for the configurations below, and those of drafts and of
the host tier, which ``warm`` leaves to the server. "each": only the first variant of each kernel, from few
configurations; "default": those of a server of 20b without options; NAME: all variants of this kernel there.
-v: print what each takes. One GPU per process, because Triton caches its target.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import triton
from triton.compiler import ASTSource

from chorale.config.engine import EngineConfig
from chorale.engine.types import EARLY_STOPS
from chorale.kernels.triton import pages, tuning
from chorale.kernels.triton.dense import draft, linear, norm, qkv, skinny, skinny_fused
from chorale.kernels.triton.precompile.compiler import Precompiler
from chorale.kernels.triton.precompile.contract import compile_arguments
from chorale.kernels.triton.precompile.target import TargetDriver, compiled_for
from chorale.kernels.triton.sampling import draft_steps, sample
from chorale.machine.gpus import find_gpu, hardware_of
from chorale.model.config_writer import SHAPES, make_config
from chorale.serve.engine.warm import Target, ranks_of, shapes_of
from tests.support.kernels.hazards import disassemble, overwritten, resources

# Several ranks come first: one rank launches some of their kernels in variants that exchange nothing.
EACH: list[tuple[str, dict[str, Any]]] = [
    ("20b", {"tensor_parallel_size": 2}),
    ("20b", {"enable_lora": True}),
]
CONFIGS = [
    *EACH,
    ("120b", {}),
    ("20b", {"kv_cache_dtype": "fp8"}),
    ("20b", {"tensor_parallel_size": 4}),
    ("20b", {"tensor_parallel_size": 8}),
    ("20b", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
]
HOPPER_CONFIGS: list[tuple[str, dict[str, Any]]] = [("20b", {"moe_activation_dtype": "fp8"})]

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
WIDE = {"norm_ptr", "rope_ptr", "sinks_ptr", "part_ptr", "parts_ptr", "stat_ptr", "gates_ptr", "logits_ptr"}

# Most spilled registers: gate_up of 9 to 16 tokens, which is faster all the same (Triton 3.6).
MOST_SPILLED = 5
# The router of 120b's 128 experts spills 71 registers on Hopper, and on AMD only one program fits.
MOST_SPILLED_OF, FEWEST_PROGRAMS_OF = {"router._many_kernel": 71}, {"router._many_kernel": 1}
Variant = tuple[str, Any, dict[str, Any], dict[str, str], int, int]

Kernel = tuple[str, Callable[[], Any]]  # (its ``name_of``, function that compiles it)


def name_of(kernel: Any) -> str:
    """Returns a kernel's name with its module: "gemv._down_kernel"."""
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


class Recorder(Precompiler):
    """Records kernels without compiling them."""

    def _start_threads(self) -> None: ...

    def _through_pool(self, key: str, compile_: Callable[[], Any]) -> Callable[[], Any]:
        return compile_

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        """Yields (Triton's key, kernel)."""
        for key, pending in self._kernels.items():
            yield key, (name_of(compile_arguments(pending._compile)["src"].fn), pending.result)


def kernels_of_servers(
    target: Target, configs: list[tuple[str, dict[str, Any]]], num_ranks: int
) -> list[Kernel]:
    """Returns the kernels of the servers that fit into the GPU's memory, on their first rank."""
    found: dict[str, Kernel] = {}
    for size, options in configs:
        if size == "120b" and target.hardware.total_bytes < 80 * 10**9:
            continue
        config, model = EngineConfig(model=size, **options), make_config(**SHAPES[size])
        for rank in ranks_of(config, model)[:num_ranks]:
            recorder = Recorder()
            shapes_of(config, model, target, rank).record(recorder)
            found |= dict(recorder.kernels())
    return list(found.values())


def kernels_of_drafts_and_pages(target: Target, arch: tuning.ArchTuning) -> Iterator[Kernel]:
    nvidia = target.architecture.startswith("sm_")
    hopper = nvidia and int(target.architecture.removeprefix("sm_")) >= 90
    driver = TargetDriver(target.architecture, target.multiprocessors)
    found = _draft_head(arch, hopper) + _steps_with_drafts(nvidia) + _pages()
    if hopper:
        found += [each for tokens in (1, 4, 8) for each in fused_draft_variants(tokens)]
    for _, kernel, constants, types, warps, stages in found:
        made, options = source(kernel, constants, types), {"num_warps": warps, "num_stages": stages}
        yield (
            name_of(kernel),
            lambda made=made, options=options: triton.compile(  # type: ignore[misc]
                made, driver.get_current_target(), options
            ),
        )


def _draft_head(arch: tuning.ArchTuning, hopper: bool) -> list[Variant]:
    """Returns the kernels of a draft head of the published size, for one token and for a few."""
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
    normed = {"norm_ptr": "*fp32", "layer_stride": "i64"}
    heads = {**HEADS, "HEADS": 4, "PDL": hopper}
    for name, count in (("draft heads", HEADS["NUM_Q"]), ("draft keys", 0)):
        found.append((name, draft._norm_rotate_kernel, heads | {"NUM_Q": count}, wide | normed, 4, 3))
    for adds in (False, True):
        name = "draft row, added" if adds else "draft row"
        found.append((name, linear._gemv_kernel, row | {"ADD": adds}, out, stream.num_warps, 3))
    for keeps in (False, True):
        constants = {"KEEPS_NORMED": keeps, "BLOCK": 4096, "PDL": hopper}
        name = "draft pair, normed" if keeps else "draft pair"
        found.append((name, draft._pair_kernel, constants, pair, 8, 3))
    return found


def fused_draft_variants(tokens: int) -> list[Variant]:
    """Returns the fused kernels of a draft head, one per product."""
    found: list[Variant] = []

    def add(name: str, kernel: Any, product: Any, sizes: dict[str, Any], types: dict[str, str]) -> None:
        constants = skinny_fused.constants_of(product)
        warps = constants["num_warps"]
        rest = {key: value for key, value in constants.items() if key != "num_warps"}
        found.append((f"{name} {tokens}", kernel, sizes | rest, types, warps, 3))

    if (tile := tuning.draft_qkv(tokens)) is not None:
        product = replace(skinny_fused.product_of(tile, tokens, 5760, 64, True), norm=False)
        add("draft qkv", skinny_fused._qkv_kernel, product, {**HEADS, "K": 5760, "norm_ptr": None}, {})
    if (tile := tuning.draft_gated(tokens)) is not None:
        product = replace(skinny_fused.product_of(tile, tokens, 2880, 0, True), norm=True, early="")
        add("draft gated", skinny_fused._gated_kernel, product, {"H": 2880}, {"x_ptr": "*fp32"})
    if (tile := tuning.draft_down(tokens)) is not None:
        product = skinny_fused.product_of(tile, tokens, 17280, 0, True)
        sizes = {"K": 17280, "HAS_BIAS": False}
        add("draft down", skinny_fused._project_kernel, product, sizes, {"residual_ptr": "*fp32"})
    return found


def _pages() -> list[Any]:
    """Returns the copies of 120b's pages of 64 tokens, 8 bytes at a time."""
    sizes = {"FIRST": 0, "WIDTH": 16384, "PAGE": 18 * 16384, "PART": pages.PART, "BLOCK": pages.BLOCK}
    types = {"address_ptr": "*i64", "pages_ptr": "*i64"}
    return [
        (name, pages._pages_kernel, sizes | {"IS_GATHER": is_gather}, types, 4, 3)
        for name, is_gather in (("gather pages", True), ("scatter pages", False))
    ]


def _steps_with_drafts(asm: bool) -> list[Variant]:
    """Returns the kernels that verify and make drafts, and that sample with the head's own token ids."""
    types = dict.fromkeys(
        ("rows_ptr", "new_token_ptr", "new_block_ptr", "row_tables_ptr", "keys_ptr"), "*i32"
    )
    types |= dict.fromkeys(("index_ptr", "stops_ptr"), "*i32")
    types |= dict.fromkeys(("forbidden_ptr", "octets_ptr"), "*u8")
    types |= dict.fromkeys(("last_ptr", "position_ptr", "slot_ptr"), "*i64")
    types |= dict.fromkeys(("temperature_ptr", "filters_ptr", "best_ptr", "edge_ptr", "most_ptr"), "*fp32")
    chosen = types | {"token_ptr": "*i32", "out_ptr": "*i64", "ids_ptr": "*i64"}
    pieces = {"BLOCK": 1024, "BLOCKS": 8, "STOPS": EARLY_STOPS, "ASM": asm, "FIRST": 0}
    sampled: list[Variant] = [("rows of a draft", sample._rows_kernel, {"PIECES": 32}, chosen, 1, 3)]
    for filtered in (False, True):
        constants = pieces | {"FILTERED": filtered, "MASKED": filtered}
        sampled.append(("pieces of a draft", sample._pieces_kernel, constants, chosen, 4, 3))
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
    return found + sampled


def source(kernel: Any, constants: dict[str, Any], types: dict[str, str]) -> ASTSource:
    signature, attributes = {}, {}
    names = list(inspect.signature(kernel.fn).parameters)
    for place, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name) or type_of(name)
        # Properties that Triton detects at a launch: aligned pointers, and sizes that are multiples of 16.
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


def spilled(compiled: Any) -> int:
    """Returns the number of spilled registers of a thread, or, for NVIDIA, of stores that spill."""
    if "cubin" in compiled.asm:
        cubin = compiled.asm["cubin"]
        return len(re.findall(r"\bSTL\b", disassemble(cubin))) if may_spill(cubin) else 0
    return int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", compiled.asm["amdgcn"])[-1])


def may_spill(cubin: bytes) -> bool:
    """Returns whether a thread has a stack frame, which spilled registers need. This avoids disassembling,
    which takes longer than compiling.

    The cubin's section .nv.info holds the frame's size: 0x04, EIATTR_FRAME_SIZE (0x11), two bytes of length,
    the symbol, the size. A false match only causes a kernel without a frame to be disassembled.
    """
    frames = re.findall(rb"\x04\x11\x08\x00.{4}(.{4})", cubin, re.DOTALL)
    return not frames or any(map(any, frames))


# Kernels that write into peers' memory.
OVER_RANKS = {
    *("one_shot._rows_kernel", "two_shot._scattered_kernel", "choices._choices_kernel"),
    *("thresholds._round_kernel", "shared_sample._choose_kernel"),
}


def check_over_ranks(name: str, ptx: str) -> None:
    """Asserts that peers' memory is written and polled 16 bytes at a time, that flags are released and
    acquired, and that NVLink multicast is not used."""
    assert "st.relaxed.sys.global.v4.b32" in ptx
    polls = re.findall(r"ld\.relaxed\.sys\.global\.(\S+) \{", ptx)
    assert set(polls) == {"v4.b32"}, polls
    is_flagged = name == "two_shot._scattered_kernel"
    assert ("st.release.sys.global.b32" in ptx) == is_flagged
    assert ("ld.acquire.sys.global.b32" in ptx) == is_flagged
    assert "multimem" not in ptx


def check(compiled: Any, name: str, arch: tuning.ArchTuning) -> bool:
    """Checks the machine code without running it. Returns whether it accesses peers' memory."""
    nvidia = "cubin" in compiled.asm
    assert len(compiled.asm["cubin" if nvidia else "hsaco"]) > 1000, name
    if (
        name == "hopper_kernel._product_kernel"
    ):  # Gluon's, for Hopper: one program may have all shared memory but 1 KiB
        assert compiled.metadata.shared <= arch.shared - 1024, compiled.metadata.shared
        bad = overwritten(disassemble(compiled.asm["cubin"]))
        assert not bad, bad[:5]
        return False
    if arch.shared == 100 * tuning.KIB:  # a program gets 1 KiB less than a multiprocessor has
        shared = compiled.metadata.shared + resources(compiled.asm["cubin"])["SHARED"]
        assert shared <= arch.shared - 1024, f"{name}: {shared} bytes of shared memory"
    programs = FEWEST_PROGRAMS_OF.get(name, 2)
    assert programs * compiled.metadata.shared <= arch.shared, f"{name}: {programs} programs do not fit"
    count = spilled(compiled)
    assert count <= MOST_SPILLED_OF.get(name, MOST_SPILLED), f"{name}: {count} registers do not fit"
    reaches_peers = nvidia and ".sys.global" in compiled.asm["ptx"]
    if reaches_peers:
        check_over_ranks(name, compiled.asm["ptx"])
    return reaches_peers


def show(name: str, compiled: Any) -> None:
    """Prints shared memory (bytes), registers per thread and spilled registers of a kernel."""
    shared, registers = compiled.metadata.shared, "-"
    if "cubin" in compiled.asm:
        found = resources(compiled.asm["cubin"])
        shared, registers = shared + found["SHARED"], str(found["REG"])
    print(f"{name:36} shared {shared:6} registers {registers:>3} spilled {spilled(compiled):3}", flush=True)


def main(gpu_name: str, chosen: list[str], verbose: bool) -> None:
    gpu = find_gpu(gpu_name)
    target = Target(hardware_of(gpu), gpu.architecture, gpu.multiprocessors)
    arch = tuning.ARCH_TUNINGS[gpu.architecture]
    each, is_whole = chosen == ["each"], not chosen
    is_some = chosen not in ([], ["each"], ["default"])
    configs = CONFIGS + (HOPPER_CONFIGS if gpu.architecture == "sm_90" else []) if is_whole else EACH
    if chosen and not each:
        configs = [("20b", {})]
    names, over_ranks, faults = set[str](), set[str](), list[str]()
    with compiled_for(target.architecture, target.multiprocessors):
        kernels = kernels_of_servers(target, configs, 8 if is_whole else 1)
        if each or is_whole:
            kernels += kernels_of_drafts_and_pages(target, arch)
        for name, compile_ in kernels:
            if (each and name in names) or (is_some and name not in chosen):
                continue
            names.add(name)
            compiled = compile_()
            try:
                if check(compiled, name, arch):
                    over_ranks.add(name)
            except AssertionError as error:
                faults.append(str(error))
            if verbose:
                show(name, compiled)
    assert not faults, faults
    assert names >= set(chosen) - {"each", "default"}, names
    if each or is_whole:
        assert over_ranks == (OVER_RANKS if gpu.architecture.startswith("sm_") else set()), over_ranks
    print(f"{gpu.name}: {len(kernels)} kernels recorded, of {len(names)} functions")


if __name__ == "__main__":
    main(sys.argv[1], [word for word in sys.argv[2:] if word != "-v"], "-v" in sys.argv)
