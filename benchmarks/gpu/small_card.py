"""Runs gpt-oss-20b as on a GPU with little memory, on a GPU with more.

    chorale bench make-checkpoint 20b FOLDER
    python -m benchmarks.gpu.small_card FOLDER [--gib 15] [--max-model-len 32768] [--json FILE]
    python -m benchmarks.gpu.pool_fill FOLDER --gib 15 --max-model-len 32768   # the largest steps

Two limits stand for the smaller card: ``gpu_memory_utilization`` is the share GIB of the GPU's memory, from
which the engine takes its sizes; and PyTorch's allocator fails above GIB less what the driver's context had
taken before. Libraries, kernels and graphs are outside of the allocator: so after each case the memory in
use on the whole device is compared with GIB (``OVER``: more), and no other process may use the device. It
prints the engine's notes, tokens a second of each case as ``benchmarks.offline`` does, and the peak: the
engine fills its share with KV pages, so the plan is right if the peak is within 3 % of GIB.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import chorale
from benchmarks.gpu.pool_fill import Taken
from benchmarks.offline import Case, line, measure, seconds_of
from chorale.runtime.sizing.memory import GIB

CASES = ("1:128:512", "4:128:512", "16:1024:256", "1:32000:256", "4:8000:256")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("model", help="folder of a checkpoint; its weights may be random")
    options.add_argument("--gib", type=float, default=15.0)
    options.add_argument("--max-model-len", type=int, default=32768)
    options.add_argument("--cases", type=Case.read, nargs="+", default=[Case.read(case) for case in CASES])
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--options", type=json.loads, default={}, help="more arguments of LLM, as JSON")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    free, total = torch.cuda.mem_get_info()  # opens the context
    allowed = int(given.gib * GIB)
    torch.cuda.set_per_process_memory_fraction((allowed - (total - free)) / total)
    print(f"{torch.cuda.get_device_name()}: {total / GIB:.2f} GiB, of which {given.gib:g} may be used; "
          f"{(total - free) / GIB:.2f} in use at the start")  # fmt: skip
    settings = {"max_model_len": given.max_model_len, "enable_prefix_caching": False} | given.options
    found: dict[str, Any] = {"gib": given.gib, "context": (total - free) / GIB, "cases": []}
    with chorale.LLM(model=given.model, gpu_memory_utilization=allowed / total, **settings) as llm:
        print(*llm.info.notes, sep="\n")
        print(f"{llm.info.num_kv_tokens:,} tokens in the KV pool; ready: {memory(given.gib)}", flush=True)
        for case in given.cases:
            found["cases"].append(asdict(case) | measure(seconds_of(chorale, llm, case), case, given.runs))
            print(f"{line(found['cases'][-1])}  {memory(given.gib)}", flush=True)
        taken = Taken.now()
    found["peak"] = taken.device
    difference = taken.device / given.gib - 1
    print(f"peak {taken.device:.2f} GiB, {difference:+.1%} of the plan; {taken.retries} retries")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    sys.exit(abs(difference) > 0.03)


def memory(gib: float) -> str:
    taken = Taken.now()
    over = " OVER" if taken.device > gib else ""
    return f"device {taken.device:.2f} GiB, allocator {taken.reserved:.2f}{over}"


if __name__ == "__main__":
    main()
