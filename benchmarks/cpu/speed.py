"""Measures gpt-oss on a CPU: start, first token, prompts, decoding, peak memory and bandwidth.

    python -m benchmarks.cpu.speed MODEL [--ops cpu] [--cpu-precision int8] [--num-threads 2]

It calls ``LLM.generate`` for one sequence at a time, with random prompts. A second run starts with the files
in the system's page cache. Weights may be random: speed does not depend on their values.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.figures import PROMPTS, random_prompt, report
from benchmarks.timing import spent, times
from chorale import LLM, SamplingParams
from chorale.model.config import ModelConfig
from chorale.runtime.sizing.memory import token_bytes, weight_bytes


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("model", type=Path, help="folder of a checkpoint")
    options.add_argument("--ops", default="auto")
    options.add_argument("--cpu-precision", default="auto")
    options.add_argument("--num-threads", type=int)
    options.add_argument("--prompts", type=int, nargs="+", default=PROMPTS)
    given = options.parse_args()
    began = time.perf_counter()
    settings: dict[str, Any] = {"ops": given.ops, "cpu_precision": given.cpu_precision}
    if given.num_threads is not None:
        settings["num_threads"] = given.num_threads
    with LLM(
        str(given.model), device="cpu", max_model_len=4096, enable_prefix_caching=False, **settings
    ) as llm:
        print(f"start               {time.perf_counter() - began:8.2f} s, {llm.info.ops}")
        decode = report(partial(seconds, llm), given.prompts)
        report_bandwidth(ModelConfig.load(given.model), decode, "int8" in llm.info.ops)


def seconds(llm: LLM, length: int, tokens: int) -> float:
    """Returns the seconds of one request with a random prompt."""
    prompt = {"prompt_token_ids": random_prompt(length)}
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1)
    return spent(lambda: llm.generate([prompt], params, use_tqdm=False))


def report_bandwidth(config: ModelConfig, decode: float, int8: bool) -> None:
    """Prints the bandwidth of decoding, and as a comparison a plain memory read with as many threads."""
    read = token_bytes(config, "bfloat16")
    if int8:
        read -= weight_bytes(config, "bfloat16") - weight_bytes(config, "bfloat16", int8=True)
    plain = plain_read()
    reached = read / decode
    print(f"weights of a token  {read / 1e9:8.2f} GB: {reached / 1e9:.1f} GB/s", end="")
    print(f", {reached / plain:.0%} of a plain read ({plain / 1e9:.1f} GB/s)")


def plain_read() -> float:
    """Returns bytes per second, the best of five sums over 1 GiB."""
    data = torch.ones(2**27, dtype=torch.int64)
    return 2**30 / min(times(data.sum, 5))


if __name__ == "__main__":
    main()
