"""The whole engine on a GPU, on plain-torch ops and on the kernels: the numbers of the CPU, however the work
is cut. ``pytest -m gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.engine.commands import MEMORY, Command
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config
from tests.gpu.scores import FLOAT32_BOUND, check_rounding, differences, scores
from tests.model.test_puzzle import CONFIG, logprobs_of_layers
from tests.support.device.model import VOCAB
from tests.support.runtime import each_alone, make_engine, random_prompt, request, run, tokens_of

pytestmark = pytest.mark.gpu
OPS = ("reference", "triton")


@pytest.fixture(scope="module")
def cpu(checkpoint: Path) -> dict[str, list[float]]:
    return scores(checkpoint, device="cpu")


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("chunk", [7, 64, 2048])
def test_float32_equals_the_cpu(checkpoint: Path, cpu: dict[str, list[float]], chunk: int, ops: str) -> None:
    gpu = scores(checkpoint, device="cuda", dtype="float32", ops=ops, max_num_batched_tokens=chunk)
    assert max(differences(cpu, gpu)) < FLOAT32_BOUND


@pytest.mark.parametrize(
    ("ops", "block_size"), [("reference", 16), ("triton", 16), ("triton", 64), ("triton", 128)]
)
def test_bfloat16_stays_within_its_bound(
    checkpoint: Path, cpu: dict[str, list[float]], ops: str, block_size: int
) -> None:
    gpu = scores(checkpoint, device="cuda", dtype="bfloat16", ops=ops, block_size=block_size)
    check_rounding(differences(cpu, gpu))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_blocks_stay_near_the_cpu_with_fp8_blocks(checkpoint: Path, dtype: str) -> None:
    """The same roundings of K and V on both sides, but for values next to a midpoint."""
    cpu = scores(checkpoint, device="cpu", kv_cache_dtype="fp8")
    gpu = scores(checkpoint, device="cuda", dtype=dtype, ops="triton", kv_cache_dtype="fp8")
    check_rounding(differences(cpu, gpu), times=2)


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
def test_any_company_and_any_cutting_gives_the_same_tokens(checkpoint: Path, options: dict[str, Any]) -> None:
    """On plain torch; ``test_gpu_graphs.py`` has the kernels."""
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_model_len": 512}
    settings["ops"] = "reference"
    asked = [
        request(f"r{i}", random_prompt(20 + 30 * i, seed=i), max_tokens=40, seed=i, temperature=i % 2)
        for i in range(8)
    ]
    alone = make_engine(checkpoint, **settings, enable_prefix_caching=False, async_scheduling=False)
    together = run(make_engine(checkpoint, **{**settings, **options}), asked)
    assert tokens_of(together) == each_alone(alone, asked)


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


WIDE = make_config(
    layers=3, experts=6, hidden=2880, inter=2880, heads=64, kv_heads=8, vocab=VOCAB,
    layer_experts=(6, 4, 5), layer_windows=(128, 200, 0),
)  # fmt: skip


@pytest.mark.parametrize(("config", "length"), [(CONFIG, 150), (WIDE, 450)], ids=["small", "wide"])
def test_puzzle_equals_layers_of_transformers(config: ModelConfig, length: int, tmp_path: Path) -> None:
    """Layers with experts and windows of their own, in float32 and bfloat16."""
    folder, tokens = write_random_checkpoint(tmp_path, config, seed=1), random_prompt(length, seed=3)
    expected = logprobs_of_layers(config, tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
    for dtype in ("float32", "bfloat16"):
        core = make_engine(folder, device="cuda", ops="triton", dtype=dtype, max_num_batched_tokens=128)
        asked = request("p", tokens, max_tokens=1, prompt_logprobs=0)
        entries = run(core, [asked])["p"][0].prompt_logprobs or []
        core.shutdown()
        found = torch.tensor([entry.logprob for entry in entries if entry is not None])
        off = (found - expected.flatten()).abs()
        print(f"{dtype}: mean difference {off.mean():.2e}, worst {off.max():.2e}")
        if dtype == "float32":
            assert off.max() < FLOAT32_BOUND
        else:
            check_rounding(off.tolist(), times=2)
