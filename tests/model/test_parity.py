"""Log-probabilities against transformers' GptOssForCausalLM, both in float32, on random checkpoints.

Their experts get the dequantised MXFP4 values, ours are loaded from the packed file. The bound, 1e-3, is the
issue's; what float32 gives at these sizes is about 1e-5.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chorale.measure.bench.checkpoint_writer import RandomTensors
from chorale.model.config import ModelConfig, RopeConfig
from chorale.model.config_writer import config_json, make_config
from chorale.model.layouts import tensor_specs
from tests.support.device.model import SMALL, MakeModel, largest_difference, prompt
from tests.support.device.paged import PagedRunner

BOUND = 1e-3


def transformers_model(config: ModelConfig, seed: int = 1) -> Any:
    # Here, because every worker imports the tests, and this import takes two seconds.
    from transformers import GptOssConfig, GptOssForCausalLM

    raw = {**config_json(config, "dense"), "torch_dtype": "float32", "eos_token_id": 0, "pad_token_id": 0}
    theirs = GptOssForCausalLM._from_config(
        GptOssConfig(**raw), attn_implementation="eager", dtype=torch.float32
    )
    source = RandomTensors(config, seed)
    state = {
        spec.name: source.tensor(spec.layer, spec.role).float() for spec in tensor_specs(config, "dense")
    }
    theirs.load_state_dict(state)
    return theirs.eval()


@torch.inference_mode()
def expected_logprobs(config: ModelConfig, tokens: list[int], seed: int = 1) -> torch.Tensor:
    logits = transformers_model(config, seed)(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)


def assert_parity(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert logits.dtype == torch.float32
    difference = largest_difference(logits, expected)
    assert difference < BOUND, f"log-probabilities differ by {difference:.2e}"


@pytest.mark.parametrize(
    ("length", "sizes", "layout"),
    [
        *((length, {}, "published") for length in (1, 127, 128, 129, 300)),
        (200, {"experts": 4, "layers": 2}, "published"),
        (200, {"experts": 8, "layers": 2}, "dense"),
        (200, {"experts": 32, "layers": 2}, "reference"),
        (300, {"layers": 1, "layer_types": ("sliding_attention",)}, "published"),
        (300, {"layers": 1, "layer_types": ("full_attention",)}, "published"),
    ],
)
def test_a_prompt_at_once(make_model: MakeModel, length: int, sizes: dict[str, Any], layout: Any) -> None:
    """Lengths around the window, experts, layouts, and one layer of each kind."""
    config = make_config(**{**SMALL, **sizes})
    tokens = prompt(length)
    runner = PagedRunner(make_model(config, layout))
    assert_parity(runner.run(tokens), expected_logprobs(config, tokens))


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden": 96, "inter": 32, "heads": 3, "kv_heads": 3, "head_dim": 10},  # no grouping
        {"hidden": 32, "inter": 160, "heads": 7, "kv_heads": 1, "head_dim": 6},  # one kv head
        {"hidden": 160, "inter": 64, "heads": 9, "kv_heads": 3, "head_dim": 34, "experts_per_token": 1},
        {"sliding_window": 5, "layers": 3},  # more window layers than full ones
        {"hidden": 224, "inter": 288, "head_dim": 64, "layer_types": ("full_attention",) * 4},
    ],
    ids=["mha", "mqa", "odd", "window5", "all-full"],
)
def test_odd_sizes(make_model: MakeModel, sizes: dict[str, Any]) -> None:
    config = make_config(**{**SMALL, **sizes})
    tokens = prompt(150)
    runner = PagedRunner(make_model(config), block_size=8)
    expected = expected_logprobs(config, tokens)
    assert_parity(runner.run(tokens), expected)
    assert_parity(runner.run(tokens, chunk=37), expected)


def test_experts_decoded_as_they_are_used(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the big checkpoints: nothing decoded at load. In chunks, with stale blocks."""
    monkeypatch.setattr("chorale.kernels.reference.moe.DECODED_BUDGET", 0)
    config = make_config(**SMALL)
    tokens = prompt(300)
    runner = PagedRunner(make_model(config), block_size=1, num_blocks=800)
    runner.poison_free_blocks()
    assert_parity(runner.run(tokens, 7), expected_logprobs(config, tokens))


def test_yarn_as_transformers_truncates_it(make_model: MakeModel) -> None:
    """Both readings of ``truncate`` agree with transformers, and they differ from each other."""
    tokens = prompt(400)
    results = []
    for truncate in (False, True):
        rope = RopeConfig(truncate=truncate, factor=8.0, original_max_position=64, theta=10000.0)
        config = make_config(**{**SMALL, "layers": 2, "head_dim": 64, "rope": rope})
        logits = PagedRunner(make_model(config, seed=3 + truncate)).run(tokens)
        assert_parity(logits, expected_logprobs(config, tokens, seed=3 + truncate))
        results.append(PagedRunner(make_model(config, seed=9)).run(tokens))
    assert largest_difference(results[0], results[1]) > 10 * BOUND
