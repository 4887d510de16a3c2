"""Rows do not disturb each other: mixed prefill and decode, ragged rows, stale blocks, reused blocks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from chorale.kernels.reference import attention
from chorale.model.config_writer import make_config
from tests.support.device.model import SMALL, MakeModel, largest_difference, load_model, prompt
from tests.support.device.paged import PagedRunner, Sequence

# Rows of a step differ from the same rows alone only by the rounding of matrix products whose kernel torch
# picks by shape; at these sizes that is about 2e-6.
ROUNDING = 5e-5


@pytest.mark.parametrize(("block_size", "limit"), [(4, 2**24), (64, 2000)])
def test_random_schedules_equal_running_alone(
    make_model: MakeModel, block_size: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve sequences, random chunks, several arriving and leaving while others decode. ``limit``: elements
    that attention may have in memory."""
    model = make_model(make_config(**SMALL))
    rng = random.Random(block_size)
    prompts = [prompt(rng.choice([1, 5, 130, 200, 290]), seed) for seed in range(12)]
    alone = [PagedRunner(model, block_size=block_size).run(tokens) for tokens in prompts]
    monkeypatch.setattr(attention, "_MAX_SCORES", limit)
    monkeypatch.setattr(attention, "_MAX_GATHER", limit)
    runner = PagedRunner(model, block_size=block_size, num_blocks=2400 // block_size + 200, seed=3)
    runner.poison_free_blocks()
    waiting = list(range(12))
    running: dict[int, Sequence] = {}
    results: dict[int, list[torch.Tensor]] = {i: [] for i in waiting}
    while waiting or running:
        if waiting and (len(running) < 3 or rng.random() < 0.3):
            arrival = waiting.pop(0)
            running[arrival] = Sequence(prompts[arrival])
        chosen = rng.sample(sorted(running), rng.randint(1, len(running)))
        work = []
        for i in chosen:
            left = len(running[i].tokens) - running[i].computed
            work.append((running[i], min(left, rng.choice([1, 1, 1, 2, 40, 300]))))
        for i, logits in zip(chosen, runner.step(work), strict=True):
            results[i].append(logits)
        for i in chosen:
            if running[i].computed == len(running[i].tokens):
                runner.release(running.pop(i))
                runner.poison_free_blocks()
    for i, expected in enumerate(alone):
        assert largest_difference(torch.cat(results[i]), expected) < ROUNDING


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16(make_model: MakeModel, tmp_path: Path, kv_dtype: torch.dtype) -> None:
    """bfloat16 weights and products stay near float32: 8 bits of mantissa, 4 layers, logits of order 1."""
    exact = make_model(make_config(**SMALL))
    rounded = load_model(tmp_path / "published-1", torch.bfloat16)
    tokens = prompt(150)
    expected = PagedRunner(exact).run(tokens)
    actual = PagedRunner(rounded, dtype=kv_dtype).run(tokens, 64)
    difference = (actual.log_softmax(-1) - expected.log_softmax(-1)).abs()
    assert difference.mean() < 0.05
    assert difference.max() > 1e-4  # else bfloat16 was not used


def test_equal_steps_are_bit_identical(make_model: MakeModel) -> None:
    model, tokens = make_model(make_config(**SMALL)), prompt(140)
    first = PagedRunner(model, seed=1).run(tokens, 33)
    assert torch.equal(first, PagedRunner(model, seed=2).run(tokens, 33))  # in other blocks
