"""What pages in bfloat16 and in e4m3 cost in accuracy, anywhere: otherwise the reference ops in float32.

    python benchmarks/kv_cache_error.py [--length 2048]

First attention alone, at gpt-oss's sizes (64 query heads, 8 kv heads of 64), keys and values normal: the
error's norm over the result's. Then a random model of four layers with those heads, one prompt: the mean and
the largest difference of a token's log-probability. Random weights: nothing about a trained model's quality.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from chorale.config import EngineConfig
from chorale.engine.types import GenerateRequest, SamplingSpec
from chorale.kernels.ops import AttentionMeta, AttentionShape
from chorale.kernels.reference import attention as paged
from chorale.model.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from chorale.serve.engine.build import build_engine

KV_BLOCK = 64
SHAPE = AttentionShape(num_heads=64, num_kv_heads=8, head_dim=64, sliding_window=128)
FORMATS = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def attention_errors(length: int, sharpness: float) -> dict[str, float]:
    """One query of a full layer; ``sharpness`` multiplies it, so that fewer keys count."""
    torch.manual_seed(0)
    pages = -(-length // KV_BLOCK)
    exact = torch.randn(pages, 2, SHAPE.num_kv_heads, KV_BLOCK, SHAPE.head_dim)
    table = torch.arange(pages, dtype=torch.int32)[None]
    nowhere = torch.zeros(1, dtype=torch.int64)
    meta = AttentionMeta(
        positions=torch.tensor([length - 1]),
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=(table, table),
        slots=(nowhere, nowhere),
        max_query_len=1,
        max_context_len=length,
    )
    plan = paged.plan_attention(meta, SHAPE, KV_BLOCK)
    q, sinks = torch.randn(1, SHAPE.num_heads, SHAPE.head_dim) * sharpness, torch.zeros(SHAPE.num_heads)
    expected = paged.attention(q, exact, sinks, plan, 0)
    found = {name: paged.attention(q, exact.to(dtype), sinks, plan, 0) for name, dtype in FORMATS.items()}
    return {name: float((out - expected).norm() / expected.norm()) for name, out in found.items()}


def log_probabilities(folder: Path, prompt: list[int], kv_cache_dtype: str) -> np.ndarray:
    config = EngineConfig(
        model=str(folder), device="cpu", kv_cache_dtype=kv_cache_dtype, num_gpu_blocks_override=1024,
        max_model_len=len(prompt) + 16, max_num_seqs=1,
    )  # fmt: skip
    core, _ = build_engine(config)
    spec = SamplingSpec(max_tokens=1, prompt_logprobs=0)
    core.add_request(GenerateRequest(request_id="p", prompt_token_ids=prompt, sampling=spec))
    found: list[float] = []
    while core.has_work:
        for chunk in core.step():
            found += [entry.logprob for entry in chunk.prompt_logprobs or () if entry]
    core.shutdown()
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    length = parser.parse_args().length
    for sharpness in (1.0, 3.0):
        print(f"attention, {length} keys, queries x {sharpness}: {attention_errors(length, sharpness)}")
    config = make_config(layers=4, experts=8, hidden=512, inter=512, heads=64, kv_heads=8, vocab=4096)
    prompt = np.random.default_rng(0).integers(0, 4096, length).tolist()
    with tempfile.TemporaryDirectory() as place:
        folder = write_random_checkpoint(Path(place) / "model", config)
        exact = log_probabilities(folder, prompt, "float32")
        for name in FORMATS:
            apart = np.abs(log_probabilities(folder, prompt, name) - exact)
            print(f"model, {length} tokens, {name}: mean {apart.mean():.2e}, largest {apart.max():.2e}")


if __name__ == "__main__":
    main()
