"""The whole engine on a random gpt_oss_puzzle: how requests are computed changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from tests.support import runtime
from tests.support.engine.drafters import knowing
from tests.support.runtime import make_engine, mixed_requests, request, run, tokens_of

EXPERTS, WINDOWS = (8, 4, 6, 4), (32, 0, 32, 50)


@pytest.fixture(scope="module")
def puzzle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_config(**runtime.SIZES, layer_experts=EXPERTS, layer_windows=WINDOWS)
    return write_random_checkpoint(tmp_path_factory.mktemp("puzzle") / "random", config, seed=1)


@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 7}, {"batch_invariant": True}, {"tensor_parallel_size": 2}]
)
def test_batches_chunks_ranks_drafts_and_cached_prefixes(puzzle: Path, options: dict[str, Any]) -> None:
    plain = make_engine(puzzle, enable_prefix_caching=False, ops="reference")
    alone = runtime.each_alone(plain, mixed_requests())
    core = make_engine(puzzle, async_scheduling=True, enable_return_routed_experts=True, **options)
    try:
        known = run(core, mixed_requests())
        assert tokens_of(known) == alone
        drafter = knowing(known, vocab_size=runtime.VOCAB, most=5, wrong=0.3)
        again = run(runtime.with_drafter(core, drafter), mixed_requests())
        assert tokens_of(again) == alone
        asked = request("r", runtime.random_prompt(150), max_tokens=20, routed_experts_start=0)
        ids = np.frombuffer(run(core, [asked])["r"][0].routed_experts, np.uint8).reshape(-1, 4, 4)
        assert tuple(ids.max(axis=(0, 2)) + 1) == EXPERTS
        assert run(core, mixed_requests())["r5"][0].num_cached_tokens == 160
    finally:
        core.shutdown()


def prompt_logprobs(folder: Path, **options: Any) -> torch.Tensor:
    asked = request("p", runtime.random_prompt(150), max_tokens=1, prompt_logprobs=1)
    answer = run(make_engine(folder, **options), [asked])["p"][0]
    return torch.tensor([each.logprob for each in answer.prompt_logprobs or () if each is not None])


def test_an_e4m3_cache_has_the_scales_of_the_checkpoint(puzzle: Path, tmp_path: Path) -> None:
    """Divided by 2^20, all values become 0."""
    broken = Path(shutil.copytree(puzzle, tmp_path / "broken"))
    for path in broken.glob("*.safetensors"):
        tensors = load_file(path)
        large = {name: torch.tensor(2.0**20) for name in tensors if name.endswith("v_scale")}
        save_file(tensors | large, path)
    exact = prompt_logprobs(puzzle)
    assert torch.equal(prompt_logprobs(broken), exact)  # other caches have no scales
    found = [prompt_logprobs(folder, kv_cache_dtype="fp8") for folder in (puzzle, broken)]
    near, far = ((each - exact).abs().mean() for each in found)
    assert 5 * near < far
