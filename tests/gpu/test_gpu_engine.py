"""The whole engine on a GPU, on plain-torch ops and on the kernels: the numbers of the CPU, however the work
is cut. ``pytest -m gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.engine.commands import MEMORY, Command
from tests.gpu.scores import FLOAT32_BOUND, check_rounding, differences, scores
from tests.support.runtime import make_engine, random_prompt, request, run

pytestmark = pytest.mark.gpu
OPS = ("reference", "triton")


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("chunk", [7, 64, 2048])
def test_float32_equals_the_cpu(checkpoint: Path, chunk: int, ops: str) -> None:
    cpu = scores(checkpoint, device="cpu")
    gpu = scores(checkpoint, device="cuda", dtype="float32", ops=ops, max_num_batched_tokens=chunk)
    assert max(differences(cpu, gpu)) < FLOAT32_BOUND


@pytest.mark.parametrize(
    ("ops", "block_size"), [("reference", 16), ("triton", 16), ("triton", 64), ("triton", 128)]
)
def test_bfloat16_stays_within_its_bound(checkpoint: Path, ops: str, block_size: int) -> None:
    cpu = scores(checkpoint, device="cpu")
    gpu = scores(checkpoint, device="cuda", dtype="bfloat16", ops=ops, block_size=block_size)
    check_rounding(differences(cpu, gpu))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_blocks_stay_near_the_cpu_with_fp8_blocks(checkpoint: Path, dtype: str) -> None:
    """The same roundings of K and V on both sides, but for values next to a midpoint."""
    cpu = scores(checkpoint, device="cpu", kv_cache_dtype="fp8")
    gpu = scores(checkpoint, device="cuda", dtype=dtype, ops="triton", kv_cache_dtype="fp8")
    check_rounding(differences(cpu, gpu), times=2)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_batched_tokens": 7},
        {"async_scheduling": True, "num_gpu_blocks_override": 72},  # too few blocks: preemptions
    ],
    ids=["serial", "overlap", "overlap, chunks of 7", "overlap, few blocks"],
)
def test_any_company_and_any_cutting_gives_the_same_tokens(
    checkpoint: Path, options: dict[str, Any], ops: str
) -> None:
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_model_len": 512, "ops": ops}
    asked = [
        request(f"r{i}", random_prompt(20 + 30 * i, seed=i), max_tokens=40, seed=i, temperature=i % 2)
        for i in range(8)
    ]
    alone = make_engine(checkpoint, **settings, enable_prefix_caching=False, async_scheduling=False)
    expected = {each.request_id: run(alone, [each])[each.request_id][0].token_ids for each in asked}
    together = run(make_engine(checkpoint, **{**settings, **options}), asked)
    assert {name: choices[0].token_ids for name, choices in together.items()} == expected


def test_answers_after_waking_have_the_same_bits(checkpoint: Path) -> None:
    """Graphs are captured again after each sleep."""
    core = make_engine(checkpoint, device="cuda", ops="triton", enable_sleep_mode=True, prompt_delay=0.0)
    asked = [
        request(f"r{i}", random_prompt(30 * i + 5, seed=i), max_tokens=40, seed=i, logprobs=2)
        for i in range(4)
    ]
    before, taken = run(core, asked), torch.cuda.memory_allocated()
    for level in (1, 2, 1):
        core.control(Command(action="sleep", level=level)).result(0)
        assert torch.cuda.memory_allocated() < taken  # libraries keep their workspaces
        core.control(Command(action="wake_up", tags=MEMORY)).result(0)
        while core.use_idle_time():  # the other graphs
            pass
        assert run(core, asked) == before
    core.shutdown()
