"""Measures the sampler on this CPU, at gpt-oss's vocabulary: milliseconds a row, for each mode.

    python -m benchmarks.engine.sampler_cost [--threads 1] [--rows 8]

Prints the median and the minimum of the CPU time, divided by the rows of the batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.timing import times
from chorale.engine.types import RowStart, SamplingSpec, StepPlan
from chorale.runtime.device import open_device
from chorale.runtime.sampling.logprobs import gather_in_parts
from chorale.runtime.sampling.sampler import Sampler
from chorale.runtime.steps.buffers import Buffers

VOCAB = 201088
MODES: dict[str, SamplingSpec] = {
    "greedy": SamplingSpec(temperature=0.0),
    "temperature 1": SamplingSpec(),
    "temperature 0.7": SamplingSpec(temperature=0.7),
    "top_p 0.9": SamplingSpec(top_p=0.9),
    "top_k 50": SamplingSpec(top_k=50),
    "min_p 0.05": SamplingSpec(min_p=0.05),
    "top_k 50, top_p 0.9": SamplingSpec(top_k=50, top_p=0.9),
    "penalties": SamplingSpec(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    "logit_bias, bad_words": SamplingSpec(logit_bias={1: 2.0}, bad_words=((1, 2), (3,))),
    "allowed 1,000 ids": SamplingSpec(allowed_token_ids=tuple(range(1000))),
}


def decode_plan(num_rows: int, spec: SamplingSpec) -> StepPlan:
    """Returns a plan of one decode step of each row, at position 1,000."""
    known = np.arange(1000, dtype=np.int32)
    rows = np.arange(num_rows, dtype=np.int32)
    empty = np.zeros(0, np.int32)
    return StepPlan(
        step_id=0,
        starts=tuple(RowStart(row, known, 500, spec, row, (200002,)) for row in range(num_rows)),
        rows=rows,
        num_computed=np.full(num_rows, 999, np.int32),
        num_new=np.ones(num_rows, np.int32),
        samples=np.ones(num_rows, np.bool_),
        token_ids=np.full(num_rows, -1, np.int32),
        append_row=empty,
        append_group=empty,
        append_index=empty,
        append_block=empty,
    )


def milliseconds(function: Callable[[], object], repeats: int = 30) -> tuple[float, float]:
    """Returns median and minimum CPU milliseconds of a call."""
    found = [1e3 * each for each in times(function, repeats, warm=3, clock=time.process_time)]
    return statistics.median(found), min(found)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rows", type=int, default=8)
    given = options.parse_args()
    device = open_device("cpu", given.threads)
    sampler = Sampler(device, VOCAB)
    logits = torch.randn(given.rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    print(f"{given.rows} rows of {VOCAB} logits, {given.threads} thread(s); CPU ms a row")
    for name, spec in MODES.items():
        buffers = Buffers(device, num_rows=given.rows, max_len=2048, block_size=16, vocab_size=VOCAB)
        plan = decode_plan(given.rows, spec)
        buffers.start_rows(plan)
        batch = buffers.sampling_step(plan).sampling
        show(name, milliseconds(lambda batch=batch: sampler.sample(logits, batch)), given.rows)  # type: ignore[misc]
    tokens = logits.argmax(-1)
    show("+ 20 logprobs", milliseconds(lambda: gather_in_parts(logits, tokens, 20, 1)), given.rows)
    plan = decode_plan(given.rows, SamplingSpec())
    buffers = Buffers(device, num_rows=given.rows, max_len=2048, block_size=16, vocab_size=VOCAB)
    buffers.start_rows(plan)
    show("Buffers.fill (a step)", milliseconds(lambda: buffers.fill(plan)), 1)


def show(name: str, cost: tuple[float, float], rows: int) -> None:
    print(f"  {name:24s}{cost[0] / rows:8.2f}   least {cost[1] / rows:.2f}")


if __name__ == "__main__":
    main()
