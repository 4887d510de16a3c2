"""Measures decode steps with LoRA adapters on one GPU.

    chorale bench make-checkpoint 20b FOLDER
    python -m benchmarks.gpu.adapter_speed FOLDER [--rows 64] [--output 256] [--slots 64] [--rank 16]

ROWS requests decode at once: by an engine without --enable-lora, then by one with it, without adapters and
with 1, 8 and ROWS different ones, of attention only and of attention and all experts. A case's row N has
adapter N modulo their number. Adapters are random files with PEFT's names; those of a kind are equal copies
in separate slots, which take the same time as different ones. It prints tokens a second while every row
decodes, after a first run that captures, and the longest step; then the same while another adapter is placed
again and again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from chorale.config.engine import EngineConfig
from chorale.engine.core import EngineCore
from chorale.engine.types import AdapterRef, GenerateRequest, SamplingSpec
from chorale.model.config import ModelConfig
from chorale.serve.engine.build import build_engine
from tests.support.device.lora import Draft, write_folder

WARM = 24  # tokens of each row before the measurement begins
NUMBERS = {"rows": 64, "prompt": 1024, "output": 256, "slots": 64, "rank": 16, "runs": 3}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("model", type=Path)
    for name, default in NUMBERS.items():
        options.add_argument(f"--{name}", type=int, default=default)
    given = options.parse_args()
    print(torch.cuda.get_device_name(), flush=True)
    for lora in (False, True):
        measure(given, lora)


def measure(given: argparse.Namespace, lora: bool) -> None:
    more = {"enable_lora": True, "max_loras": given.slots, "max_lora_rank": given.rank} if lora else {}
    settings: dict[str, Any] = {
        "max_num_seqs": given.rows, "enable_prefix_caching": False, "max_model_len": 4096,
        "cudagraph_capture_sizes": (given.rows,), "mixed_cuda_graphs": False, "prompt_delay": 0.0,
    }  # fmt: skip
    core, _ = build_engine(EngineConfig(model=str(given.model), **(settings | more)))
    base = case(core, given, f"base, {'with' if lora else 'without'} --enable-lora", [])
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("attention", "experts") if lora else ():
            path = write(Path(folder) / kind, ModelConfig.load(given.model), given.rank, kind)
            for count in (1, 8, given.rows):
                refs = [AdapterRef(1 + n + 1000 * (kind == "experts"), kind, str(path)) for n in range(count)]
                place(core, refs)
                case(core, given, f"{count} adapters, {kind}", refs, base)
        if lora:
            case(core, given, "base, while adapters are placed", [], base, refs[0])
    core.shutdown()
    del core
    torch.cuda.empty_cache()


def write(folder: Path, config: ModelConfig, rank: int, kind: str) -> Path:
    """Write a random adapter in bfloat16: of q, k, v and o, and of all experts."""
    draft, tensors = Draft(config), {}

    def pair(module: str, inputs: int, outputs: int, stacked: int = 1) -> None:
        for half, shape in (("A", (rank * stacked, inputs)), ("B", (outputs, rank * stacked))):
            drawn = torch.randn(shape, dtype=torch.bfloat16) * 0.01
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = drawn

    for layer in range(config.num_hidden_layers):
        for name in "qkvo":
            module = f"model.layers.{layer}.self_attn.{name}_proj"
            pair(module, *reversed(draft.shapes[f"{module}.weight"]))
        experts = f"model.layers.{layer}.mlp.experts"
        for name, wrapper in (("gate_up_proj", f"{experts}.base_layer"), ("down_proj", experts)):
            if kind == "experts":
                count, inputs, outputs = draft.shapes[f"{experts}.{name}"]
                pair(wrapper, inputs, outputs, count)
    return write_folder(folder, tensors, r=rank, lora_alpha=rank)


def place(core: EngineCore, refs: list[AdapterRef]) -> None:
    """Put the first adapter into a slot for each: reading a large file for each would take minutes."""
    queue = core._adapters
    store: Any = queue._service
    store.load(refs[0]).result()
    adapter, start = store._host[refs[0].id], time.perf_counter()
    for slot, ref in enumerate(refs):
        store._host[ref.id] = adapter
        store.place(ref, slot).result()
        queue._slots[slot] = ref.id
    each = (time.perf_counter() - start) / len(refs)
    print(f"    {each * 1e3:.0f} ms to place an adapter of {adapter.num_bytes >> 20} MiB")


def case(
    core: EngineCore, given: argparse.Namespace, name: str, refs: list[AdapterRef], base: float = 0.0,
    placed: AdapterRef | None = None,
) -> float:  # fmt: skip
    """``placed``: an adapter that is placed in the last slot again and again."""
    store: Any = core._adapters._service
    ends = threading.Event()

    def place_again() -> None:
        while not ends.is_set():
            store.place(placed, given.slots - 1).result()

    beside = threading.Thread(target=place_again)
    if placed is not None:
        beside.start()
    runs = [run(core, given, refs) for _ in range(1 + given.runs)][1:]
    ends.set()
    speeds, longest = [speed for speed, _ in runs], max(step for _, step in runs)
    found = statistics.median(speeds)
    share = f", {found / base:.1%}" if base else ""
    print(f"{name:32} {found:8,.0f} tok/s ({min(speeds):,.0f} to {max(speeds):,.0f}){share}; "
          f"longest step {longest * 1e3:.1f} ms", flush=True)  # fmt: skip
    return found


def run(core: EngineCore, given: argparse.Namespace, refs: list[AdapterRef]) -> tuple[float, float]:
    """Returns tokens a second while every row decodes, and the seconds of the longest step of that time."""
    spec = SamplingSpec(ignore_eos=True, max_tokens=given.output)
    for row in range(given.rows):
        prompt = torch.randint(1000, 190_000, (given.prompt,), generator=torch.Generator().manual_seed(row))
        adapter = refs[row % len(refs)] if refs else AdapterRef()
        asked = {"request_id": str(row), "prompt_token_ids": prompt.tolist(), "adapter": adapter}
        core.add_request(GenerateRequest(**asked, sampling=spec))
    counts = dict.fromkeys(map(str, range(given.rows)), 0)
    times, tokens = [], []
    while core.has_work:
        for chunk in core.step():
            counts[chunk.request_id] += len(chunk.token_ids)
            assert chunk.error is None, chunk.error
        if min(counts.values()) >= WARM and max(counts.values()) < given.output - 1:
            times.append(time.perf_counter())
            tokens.append(sum(counts.values()))
    longest = max(after - before for before, after in pairwise(times))
    return (tokens[-1] - tokens[0]) / (times[-1] - times[0]), longest


if __name__ == "__main__":
    main()
