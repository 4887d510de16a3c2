"""The whole engine on a GPU, on plain-torch ops: the same numbers as on the CPU, however the work is cut.

``pytest -m gpu``.

In float32 (TF32 stays off) a GPU differs from the CPU by the order of sums only. In bfloat16 each matrix
product rounds its inputs to 8 bits, which on a random model now and then turns the choice between two nearly
equal experts and moves that token's logits as a whole: so the mean is bounded tightly and the worst loosely.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runtime import make_engine, random_prompt, request, run, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LENGTHS = (1, 31, 32, 33, 127, 128, 129, 300, 900)
FLOAT32_BOUND = 1e-3
BFLOAT16_MEAN_BOUND = 0.03
BFLOAT16_WORST_BOUND = 1.0


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "random")


def scores(checkpoint: Path, **options: Any) -> dict[str, list[float]]:
    """Log-probabilities of every prompt token."""
    core = make_engine(checkpoint, **{"ops": "reference", **options})
    asked = [request(f"r{n}", random_prompt(n, seed=n), max_tokens=1, prompt_logprobs=0) for n in LENGTHS]
    answers = run(core, asked)
    return {
        name: [entry.logprob for entry in (choices[0].prompt_logprobs or []) if entry is not None]
        for name, choices in answers.items()
    }


def differences(left: dict[str, list[float]], right: dict[str, list[float]]) -> list[float]:
    assert left.keys() == right.keys()
    return [abs(a - b) for name in left for a, b in zip(left[name], right[name], strict=True)]


@pytest.mark.parametrize("chunk", [7, 64, 2048])
def test_float32_equals_the_cpu(checkpoint: Path, chunk: int) -> None:
    cpu = scores(checkpoint, device="cpu")
    gpu = scores(checkpoint, device="cuda", dtype="float32", max_num_batched_tokens=chunk)
    assert max(differences(cpu, gpu)) < FLOAT32_BOUND


def test_bfloat16_stays_within_its_bound(checkpoint: Path) -> None:
    cpu = scores(checkpoint, device="cpu")
    gpu = scores(checkpoint, device="cuda", dtype="bfloat16")
    found = differences(cpu, gpu)
    assert sum(found) / len(found) < BFLOAT16_MEAN_BOUND
    assert max(found) < BFLOAT16_WORST_BOUND


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
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_model_len": 512}
    settings["ops"] = options.get("ops", "reference")
    asked = [
        request(f"r{i}", random_prompt(20 + 30 * i, seed=i), max_tokens=40, seed=i, temperature=i % 2)
        for i in range(8)
    ]
    alone = make_engine(checkpoint, **settings, enable_prefix_caching=False, async_scheduling=False)
    expected = {each.request_id: run(alone, [each])[each.request_id][0].token_ids for each in asked}
    together = run(make_engine(checkpoint, **{**settings, **options}), asked)
    assert {name: choices[0].token_ids for name, choices in together.items()} == expected
