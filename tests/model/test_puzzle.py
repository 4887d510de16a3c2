"""gpt_oss_puzzle against layers of transformers, each made from a configuration of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.errors import AdapterError, ConfigError, ModelConfigError
from chorale.kernels import select_ops
from chorale.machine.hardware import Hardware
from chorale.measure.bench.checkpoint_writer import RandomTensors, write_random_checkpoint
from chorale.model.checkpoint import with_kv_scales
from chorale.model.config import ModelConfig
from chorale.model.config_writer import SHAPES, config_json, make_config
from chorale.model.gpt_oss import GptOss
from chorale.model.layouts import tensor_specs
from chorale.model.lora.read import read_adapter
from chorale.model.weights import Target, load_weights
from chorale.runtime.sizing.resolve import resolve
from tests.model.test_parity import assert_parity, transformers_model
from tests.support.device.lora import write_adapter
from tests.support.device.model import SMALL, MakeModel, largest_difference, prompt
from tests.support.device.paged import PagedRunner

# Windows of 12 and 40 tokens and none, as the published model has 128, 8192 and none.
CONFIG = make_config(
    **{**SMALL, "layers": 6},
    sliding_window=12,
    layer_types=("sliding_attention", "full_attention", "full_attention") * 2,
    layer_experts=(8, 8, 4, 8, 6, 4),
    layer_windows=(12, 0, 40, 12, 40, 0),
)
TOKENS = prompt(150)


def logprobs_of_layers(config: ModelConfig, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V] of transformers' layers in float32."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer

    model = transformers_model(replace(config, layer_experts=(), layer_windows=()))
    x, layers, masks = model.model.embed_tokens(torch.tensor([tokens])), torch.nn.ModuleList(), {}
    for number, (experts, window) in enumerate(zip(config.layer_experts, config.layer_windows, strict=True)):
        sizes = {"num_local_experts": experts, "sliding_window": window or None}
        own = type(model.config)(**{**model.config.to_dict(), **sizes})
        own._attn_implementation = "eager"
        layers.append(GptOssDecoderLayer(own, number))
        make_mask = create_sliding_window_causal_mask if window else create_causal_mask
        masks[str(number)] = make_mask(own, x, None, None)
    model.model.layers = layers
    model.config.__dict__["layer_types"] = list(masks)  # names of the layers' masks
    source, specs = RandomTensors(config, 1), tensor_specs(config, "dense")
    model.load_state_dict({spec.name: source.tensor(spec.layer, spec.role).float() for spec in specs})
    with torch.inference_mode():
        logits: torch.Tensor = model(inputs_embeds=x, attention_mask=masks, use_cache=False).logits[0]
    return logits.log_softmax(-1)


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return logprobs_of_layers(CONFIG, TOKENS)


@pytest.mark.parametrize(("chunk", "block_size"), [(None, 16), (1, 16), (7, 1), (37, 8)])
def test_layers_of_different_sizes_equal_those_of_transformers(
    make_model: MakeModel, expected: torch.Tensor, chunk: int | None, block_size: int
) -> None:
    assert_parity(PagedRunner(make_model(CONFIG), block_size=block_size).run(TOKENS, chunk), expected)


def load(folder: Path, *, scaled: bool) -> GptOss:
    config = ModelConfig.load(folder)
    config = with_kv_scales(folder, config) if scaled else config
    ops = select_ops("reference", "cpu")
    return GptOss(config, load_weights(folder, Target(config, ops, torch.float32)), ops, 256)


def test_scales_of_the_cache_are_applied_without_an_error(tmp_path: Path) -> None:
    """The cache has k / 0.5 and v / 2 (the checkpoint's 0.3 and 1.5, rounded up); logits keep every bit."""
    folder = write_random_checkpoint(tmp_path / "model", CONFIG, seed=1)
    write_adapter(tmp_path / "adapter", CONFIG, "attention")
    models = [load(folder, scaled=scaled) for scaled in (False, True)]
    adapters = [read_adapter(tmp_path / "adapter", m.config).map(torch.Tensor.float) for m in models]
    runners = [PagedRunner(model) for model in models]
    plain, found = (runner.run(TOKENS, 64) for runner in runners)
    assert torch.equal(plain, found)
    for before, after in zip(*(runner.kv for runner in runners), strict=True):
        assert torch.equal(before / torch.tensor([0.5, 2.0]).view(1, 2, 1, 1, 1), after)
    adapted = [r.run(TOKENS, adapter=adapter) for r, adapter in zip(runners, adapters, strict=True)]
    assert largest_difference(plain, adapted[0]) > 0.05
    assert largest_difference(*adapted) < 1e-5


def test_adapters_of_routers_and_shares_of_whole_experts_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, replace(CONFIG, layer_experts=()), "router")
    with pytest.raises(AdapterError, match="different numbers of experts"):
        read_adapter(tmp_path, CONFIG)
    config = EngineConfig(tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="--enable-expert-parallel"):
        resolve(config, CONFIG, Hardware("cpu", "cpu", 2**34, 2**34))


def test_config_json_and_the_size_of_the_published_model() -> None:
    """88 billion parameters. Its generation_config.json leaves out <|call|>, which ends a call of a tool."""
    model = make_config(**SHAPES["puzzle-88b"])
    assert round(model.num_parameters / 1e9, 1) == 88.2
    assert Counter(model.layer_windows) == {128: 18, 8192: 8, 0: 10}
    for config in (CONFIG, model):
        raw = config_json(config, "published")
        assert ModelConfig.from_dict(raw, generation={"eos_token_id": [200002, 199999]}) == config


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"block_configs": [{"num_local_experts": 8, "sliding_window": 12}]}, "block_configs"),
        ({"block_configs": [{"num_local_experts": 8}] * 6}, "block_configs[0]"),
        ({"block_configs": [{"num_local_experts": 3, "sliding_window": 12}] * 6}, "num_experts_per_tok"),
        ({"block_configs": [{"intermediate_size": 32, "sliding_window": 12}] * 6},
         "block_configs[0].intermediate_size"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types[0]"),
    ],
)  # fmt: skip
def test_faults_of_config_json(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_dict({**config_json(CONFIG, "published"), "layer_types": None, **change})
    assert caught.value.param == key
