"""``LLM(batch_invariant=True)``: requests in random mixes give the bits that they give alone.

``benchmarks/mixes.py`` makes the mixes, and does the same with any checkpoint on a GPU.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import mixes
from benchmarks.mixes import Comparison, make_requests
from chorale import LLM, SamplingParams
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config

SIZES: dict[str, Any] = {
    "layers": 2, "experts": 5, "hidden": 64, "inter": 5 * 64, "heads": 8, "kv_heads": 4, "head_dim": 16,
    "vocab": 512, "sliding_window": 32,
}  # fmt: skip
USUAL: dict[str, Any] = {"batch_invariant": True, "max_model_len": 512, "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("m"), make_config(**SIZES), seed=1)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Comparison:
    made = Comparison(make_requests(16, 2, range(512)), time.monotonic() + 600)
    with LLM(str(folder), **USUAL, enable_prefix_caching=False) as llm:
        made.run_alone(llm)
    return made


@pytest.fixture
def comparison(alone: Comparison) -> Comparison:
    alone.seen.clear()
    return alone


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("many rows", "with a cached prefix"),
        ("few rows, small chunks", "with a cached prefix"),
        ("drafts", "accepted draft tokens"),
        ("small pool", "preempted"),
        ("host memory", "tokens from host memory"),
    ],
)
def test_mixes_give_the_bits_of_requests_alone(
    name: str, condition: str, folder: Path, comparison: Comparison
) -> None:
    with LLM(str(folder), **USUAL | mixes.SETTINGS[name]) as llm:
        comparison.run_mixes(llm, name, 24, 1)
    assert comparison.seen["compared"] == 24
    assert comparison.seen["different"] == 0
    assert comparison.seen[condition] > 0


def test_four_ranks_give_the_bits_of_one(folder: Path, comparison: Comparison) -> None:
    """Processes, as on several GPUs."""
    with LLM(str(folder), **USUAL, tensor_parallel_size=4) as llm:
        comparison.run_mixes(llm, "4 ranks", 12, 1)
    assert (comparison.seen["compared"], comparison.seen["different"]) == (12, 0)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_rollout_that_is_scored_again_has_the_same_bits(folder: Path, mode: Any) -> None:
    """The experts of each position and the log-probability of each token, before and after filters: from
    decoding in a batch, and from one prefill of the tokens."""
    prompts = [[(7 * n + place) % 512 for place in range(9 + 19 * n)] for n in range(5)]
    filters: Any = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    with LLM(str(folder), **USUAL, enable_return_routed_experts=True, logprobs_mode=mode) as llm:

        def generate(some: list[list[int]], **fields: Any) -> Any:
            params = SamplingParams(**{"seed": 3, "logprobs": 0, "ignore_eos": True, **filters, **fields})
            return llm.generate(prompt_token_ids=some, sampling_params=params, use_tqdm=False)

        for prompt, output in zip(prompts, generate(prompts, max_tokens=12), strict=True):
            rollout, whole = output.outputs[0], prompt + output.outputs[0].token_ids
            ends = range(len(prompt), len(whole))
            [scored] = generate([whole], max_tokens=1, prompt_logprobs=0)
            again = [scored.prompt_logprobs[end][whole[end]] for end in ends]
            if mode == "processed_logprobs":
                one: Any = {"max_tokens": 1, "logprobs": None}
                each = [generate([whole[:end]], **one, logprob_token_ids=[whole[end]])[0] for end in ends]
                again = [next(iter(made.outputs[0].logprobs[0].values())) for made in each]
            found = [entry[token] for entry, token in zip(rollout.logprobs, rollout.token_ids, strict=True)]
            assert [one.logprob for one in again] == [one.logprob for one in found]
            np.testing.assert_array_equal(rollout.routed_experts, scored.outputs[0].routed_experts[:-1])
