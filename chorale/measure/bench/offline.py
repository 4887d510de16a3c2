"""Benchmarks of the engine without HTTP: token ids in, token ids out."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from chorale.engine.core import EngineCore
from chorale.engine.types import GenerateRequest, SamplingSpec
from chorale.errors import ChoraleError, ConfigError
from chorale.harmony.vocab import NUM_RANKS
from chorale.measure.bench.drafts import DraftCounts


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that start together."""

    rows: int
    input_len: int
    output_len: int
    temperature: float = 1.0
    seed: int = 0


def play(core: EngineCore, batch: Batch, output_len: int | None = None) -> float:
    """Runs a batch, ignoring stop tokens. Returns the seconds from the first request to the last token.

    Raises ``ConfigError`` for lengths above the engine's limit, ``ChoraleError`` if a request is refused, and
    ``RuntimeError`` if the number of generated tokens is wrong.
    """
    generator = np.random.default_rng(batch.seed)
    wanted = batch.output_len if output_len is None else output_len
    _check_lengths(core, batch.input_len, wanted)
    for row in range(batch.rows):
        core.add_request(
            GenerateRequest(
                request_id=f"bench-{row}",
                prompt_token_ids=generator.integers(0, NUM_RANKS, batch.input_len).tolist(),
                sampling=SamplingSpec(
                    temperature=batch.temperature, ignore_eos=True, max_tokens=wanted, seed=batch.seed + row
                ),
            )
        )
    begin, made = time.perf_counter(), 0
    while core.has_work:
        chunks = core.step()
        made += sum(len(chunk.token_ids) for chunk in chunks)
        errors = [chunk.error for chunk in chunks if chunk.error]
        if errors:
            raise ChoraleError(f"a request failed: {errors[0]}")
    if made != batch.rows * wanted:
        raise RuntimeError(f"{made} tokens were generated; expected {batch.rows * wanted}")
    return time.perf_counter() - begin


def _check_lengths(core: EngineCore, input_len: int, output_len: int) -> None:
    """Raises ``ConfigError`` for lengths at which the engine would end answers early."""
    most = core.limits.max_model_len
    if input_len + output_len > most:
        raise ConfigError(
            f"--input-len {input_len} and --output-len {output_len} are more than --max-model-len {most}"
        )


def latency(core: EngineCore, batch: Batch, *, warmups: int, repeats: int) -> dict[str, Any]:
    """Measures one batch at a time: seconds to its last token, and the rate after the first token."""
    for _ in range(warmups):
        play(core, batch)
    before = DraftCounts.of_engine(core.stats())
    whole = [play(core, batch) for _ in range(repeats)]
    drafts = DraftCounts.of_engine(core.stats()).since(before)
    first = [play(core, batch, 1) for _ in range(repeats)]
    seconds, start = statistics.median(whole), statistics.median(first)
    rest = batch.rows * (batch.output_len - 1)
    return {
        "batch_size": batch.rows,
        "input_len": batch.input_len,
        "output_len": batch.output_len,
        "avg_latency": statistics.fmean(whole),
        "median_latency": seconds,
        "min_latency": min(whole),
        "max_latency": max(whole),
        "median_first_token": start,
        "prefill_tokens_per_second": batch.rows * batch.input_len / start,
        "decode_tokens_per_second": rest / (seconds - start) if rest and seconds > start else 0.0,
    } | drafts.to_json()


def throughput(core: EngineCore, batch: Batch) -> dict[str, Any]:
    """Measures requests that are submitted at once. The engine limits how many run concurrently."""
    play(core, Batch(min(batch.rows, 8), min(batch.input_len, 64), min(batch.output_len, 8)))  # warm-up
    before = DraftCounts.of_engine(core.stats())
    seconds = play(core, batch)
    drafts = DraftCounts.of_engine(core.stats()).since(before)
    return {
        "num_requests": batch.rows,
        "input_len": batch.input_len,
        "output_len": batch.output_len,
        "elapsed_time": seconds,
        "requests_per_second": batch.rows / seconds,
        "output_tokens_per_second": batch.rows * batch.output_len / seconds,
        "tokens_per_second": batch.rows * (batch.input_len + batch.output_len) / seconds,
    } | drafts.to_json()
