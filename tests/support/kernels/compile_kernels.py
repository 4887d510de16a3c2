"""A script that compiles every kernel of a server for a given GPU. Needs Triton, but no GPU.

    python -m tests.support.kernels.compile_kernels h200|a100|b200|mi300x|... [each | default | NAME ...] [-v]

It compiles the kernels that ``chorale warm`` finds for the configurations below, and those of drafts and of
the host tier, which ``warm`` leaves to the server. "each": only the first variant of each kernel (of gate_up
and of down, if it is both), from few configurations; "default": those of a server of 20b without options;
NAME: all variants of this kernel there. -v: print what each takes. One GPU per process, because Triton caches
its target.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import torch

from chorale.config.engine import EngineConfig
from chorale.config.speculative import SpeculativeConfig
from chorale.kernels.triton import tuning
from chorale.kernels.triton.ops import TRITON_OPS
from chorale.kernels.triton.pages import TritonPageCopies
from chorale.kernels.triton.precompile.compiler import Precompiler
from chorale.kernels.triton.precompile.contract import compile_arguments
from chorale.kernels.triton.precompile.target import compiled_for
from chorale.machine.gpus import find_gpu, hardware_of
from chorale.model.config_writer import SHAPES, make_config
from chorale.model.draft.config import Kind, published_head
from chorale.model.draft.head import DraftHead
from chorale.model.draft.pack import weight_shapes
from chorale.runtime.drafts.drafting import DraftSetup
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
# With these sizes, a server has a form of each kernel, or small steps alone.
FEW = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "max_model_len": 4096}
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 4096, "mixed_cuda_graphs": False}
HOPPER_CONFIGS: list[tuple[str, dict[str, Any]]] = [("20b", {"moe_activation_dtype": "fp8"})]


# Most spilled registers: gate_up of 9 to 16 tokens, which is faster all the same (Triton 3.6).
MOST_SPILLED = 5
# The router of 120b's 128 experts spills 71 registers on Hopper, and on AMD only one program fits.
MOST_SPILLED_OF, FEWEST_PROGRAMS_OF = {"router._many_kernel": 71}, {"router._many_kernel": 1}


# (its ``name_of``, whether it is gate_up of two products, function that compiles it)
Kernel = tuple[str, bool, Callable[[], Any]]


def name_of(kernel: Any) -> str:
    """Returns a kernel's name with its module: "gemv._down_kernel"."""
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


class Recorder(Precompiler):
    """Records kernels without compiling them."""

    def _start_threads(self) -> None: ...

    def _through_pool(self, key: str, compile_: Callable[[], Any]) -> Callable[[], Any]:
        return compile_

    def kernels(self) -> list[Kernel]:
        """Returns those recorded so far."""
        found = []
        for each in self._kernels.values():
            source = compile_arguments(each._compile)["src"]
            constants = {source.fn.arg_names[place[0]]: value for place, value in source.constants.items()}
            found.append((name_of(source.fn), bool(constants.get("GATE_UP")), each.result))
        return found


def kernels_of_servers(
    target: Target, configs: list[tuple[str, dict[str, Any]]], num_ranks: int
) -> list[Kernel]:
    """Returns the kernels of the servers that fit into the GPU's memory, on their first rank."""
    recorder = Recorder()
    for size, options in configs:
        if size == "120b" and target.hardware.total_bytes < 80 * 10**9:
            continue
        config, model = EngineConfig(model=size, **options), make_config(**SHAPES[size])
        for rank in ranks_of(config, model)[:num_ranks]:
            shapes_of(config, model, target, rank).record(recorder)
    return recorder.kernels()


def kernels_of_drafts_and_pages(target: Target) -> list[Kernel]:
    """Returns those of small steps of 20b with each kind of draft head, and of copies of its pages."""
    recorder, model = Recorder(), make_config(**SHAPES["20b"])
    for kind in get_args(Kind):
        spec = SpeculativeConfig(method="synthetic", num_speculative_tokens=3)
        config = EngineConfig(model="20b", speculative_config=spec, **SMALL)
        shapes, head = shapes_of(config, model, target, None), published_head(model, kind)
        weights = weight_shapes(head, TRITON_OPS, torch.bfloat16)
        profile = (0.5,) * 3 if kind == "eagle3" else ()
        setup = DraftSetup(3, DraftHead(head, weights, TRITON_OPS, 4096), TRITON_OPS, profile)
        with recorder.recording():  # P-EAGLE's projects its mask when it is made
            replace(shapes, drafts=setup).record(recorder)
    meta = torch.empty(2, 1024, 16, dtype=torch.int64, device="meta")
    copies = TritonPageCopies([meta, meta])
    with recorder.recording():
        copies.gather(meta[0, 0].int(), meta.view(torch.uint8))
        copies.scatter(meta.view(torch.uint8), meta[0, 0].int())
    return recorder.kernels()


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
    if each:
        configs = [(size, options | FEW) for size, options in EACH]
    elif chosen:
        configs = [("20b", {})]
    names, over_ranks, faults = set[str](), set[str](), list[str]()
    done = set[tuple[str, bool]]()
    with compiled_for(target.architecture, target.multiprocessors):
        kernels = kernels_of_servers(target, configs, 8 if is_whole else 1)
        if each or is_whole:
            kernels += kernels_of_drafts_and_pages(target)
        for name, is_gate_up, compile_ in kernels:
            if (each and (name, is_gate_up) in done) or (is_some and name not in chosen):
                continue
            done.add((name, is_gate_up))
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
