"""Measures how fast this CPU reads memory, which limits the tokens a second of one stream.

    python -m benchmarks.cpu.bandwidth FOLDER [--cpu-precision exact] [--num-threads 2]

Prints the bytes of weights that a decoded token reads, and the best of five sums over 1 GiB.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.timing import times
from chorale.model.config import ModelConfig
from chorale.runtime.sizing.memory import token_bytes, weight_bytes


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("model", help="folder of a checkpoint")
    options.add_argument("--cpu-precision", default="int8", choices=["int8", "exact"])
    options.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    given = options.parse_args()
    torch.set_num_threads(given.num_threads)
    config, data = ModelConfig.load(given.model), torch.ones(2**27, dtype=torch.int64)
    plain = 2**30 / min(times(data.sum, 5))
    read = token_bytes(config, "bfloat16")
    if given.cpu_precision == "int8":
        read -= weight_bytes(config, "bfloat16") - weight_bytes(config, "bfloat16", int8=True)
    print(f"weights of a token  {read / 1e9:8.2f} GB")
    print(f"plain read          {plain / 1e9:8.2f} GB/s, {plain / read:.1f} tokens/s at most")


if __name__ == "__main__":
    main()
