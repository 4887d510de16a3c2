"""gpt_oss_puzzle: other numbers of experts and other windows in each layer, and scales of the KV cache.

The specification is transformers: decoder layers of gpt-oss, each made from a configuration of its own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.errors import AdapterError, ConfigError, ModelConfigError
from chorale.kernels import select_ops
from chorale.kernels.cpu.library import library
from chorale.machine.hardware import Hardware
from chorale.measure.bench.checkpoint_writer import RandomTensors, write_random_checkpoint
from chorale.model.checkpoint import with_kv_scales
from chorale.model.config import ModelConfig
from chorale.model.config_writer import SHAPES, config_json, make_config
from chorale.model.gpt_oss import GptOss
from chorale.model.layouts import tensor_specs
from chorale.model.lora.read import read_adapter
from chorale.model.weights import load_weights
from chorale.runtime.sizing.resolve import resolve
from tests.model.test_parity import assert_parity
from tests.support.device.lora import write_adapter
from tests.support.device.model import SMALL, MakeModel, largest_difference, prompt
from tests.support.device.paged import PagedRunner

# Windows of 12 and 40 tokens and none, as the model has 128, 8192 and none. Two neighbours have equal windows.
CONFIG = make_config(
    **{**SMALL, "layers": 6},
    sliding_window=12,
    layer_types=("sliding_attention", "full_attention", "full_attention") * 2,
    layer_experts=(8, 8, 4, 8, 6, 4),
    layer_windows=(12, 0, 40, 12, 40, 0),
)
TOKENS = prompt(150)


def published() -> dict[str, Any]:
    return config_json(CONFIG, "published")


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """Log-probabilities [150, V] of transformers' layers."""
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer

    plain = config_json(replace(CONFIG, layer_experts=(), layer_windows=()), "dense")
    raw = {**plain, "torch_dtype": "float32", "eos_token_id": 0, "pad_token_id": 0}
    each = [
        GptOssConfig(**{**raw, "num_local_experts": experts, "sliding_window": window or None})
        for experts, window in zip(CONFIG.layer_experts, CONFIG.layer_windows, strict=True)
    ]
    for config in each:
        config._attn_implementation = "eager"
    config = GptOssConfig(**raw)
    model = GptOssForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.model.layers = torch.nn.ModuleList(
        GptOssDecoderLayer(config, number) for number, config in enumerate(each)
    )
    source = RandomTensors(CONFIG, 1)
    names = {spec.name: (spec.layer, spec.role) for spec in tensor_specs(CONFIG, "dense")}
    model.load_state_dict({name: source.tensor(*place).float() for name, place in names.items()})
    x = model.model.embed_tokens(torch.tensor([TOKENS]))
    given: Any = {"inputs_embeds": x, "attention_mask": None, "cache": None}
    masks = {
        f"layer {number}": create_sliding_window_causal_mask(config=config, **given)
        if config.sliding_window
        else create_causal_mask(config=config, **given)
        for number, config in enumerate(each)
    }
    model.model.config.__dict__["layer_types"] = list(masks)
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(inputs_embeds=x, attention_mask=masks, use_cache=False).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize(("chunk", "block_size"), [(None, 16), (1, 16), (7, 1), (37, 8)])
def test_layers_of_different_sizes_equal_those_of_transformers(
    make_model: MakeModel, expected: torch.Tensor, chunk: int | None, block_size: int
) -> None:
    runner = PagedRunner(make_model(CONFIG), block_size=block_size)
    runner.poison_free_blocks()
    assert_parity(runner.run(TOKENS, chunk), expected)


@pytest.mark.skipif(library().functions is None, reason="the CPU library is not built")
@pytest.mark.parametrize("chunk", [None, 1, 37])
def test_the_cpu_kernels_equal_them_too(tmp_path: Path, expected: torch.Tensor, chunk: int | None) -> None:
    assert_parity(PagedRunner(load(write(tmp_path), "cpu")).run(TOKENS, chunk), expected)


def write(folder: Path) -> Path:
    return write_random_checkpoint(folder / "model", CONFIG, seed=1)


def load(folder: Path, ops_name: str = "reference", *, scaled: bool = False) -> GptOss:
    config = ModelConfig.load(folder)
    config = with_kv_scales(folder, config) if scaled else config
    ops = select_ops(ops_name, "cpu")
    return GptOss(config, load_weights(folder, config, ops, device="cpu", dtype=torch.float32), ops, 256)


def test_scales_of_the_cache_are_applied_without_an_error(tmp_path: Path) -> None:
    """The cache has k / 0.5 and v / 2 (the checkpoint's 0.3 and 1.5, rounded up); logits keep every bit."""
    folder = write(tmp_path)
    runners = [PagedRunner(load(folder, scaled=scaled)) for scaled in (False, True)]
    plain, found = (runner.run(TOKENS, 64) for runner in runners)
    assert torch.equal(plain, found)
    for before, after in zip(*(runner.kv for runner in runners), strict=True):
        assert before.any()
        assert torch.equal(before / torch.tensor([0.5, 2.0]).view(1, 2, 1, 1, 1), after)


def test_an_adapter_of_attention_with_scales(tmp_path: Path) -> None:
    folder = write(tmp_path)
    write_adapter(tmp_path / "adapter", CONFIG, "attention")
    found = []
    for scaled in (False, True):
        model = load(folder, scaled=scaled)
        adapter = read_adapter(tmp_path / "adapter", model.config).map(torch.Tensor.float)
        found.append(PagedRunner(model).run(TOKENS, adapter=adapter))
    assert largest_difference(found[0], PagedRunner(load(folder)).run(TOKENS)) > 0.05
    assert largest_difference(*found) < 1e-5


def test_an_adapter_of_the_router_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, replace(CONFIG, layer_experts=()), "router")
    with pytest.raises(AdapterError, match="different numbers of experts"):
        read_adapter(tmp_path, CONFIG)


def test_config_json_is_read_as_it_is_written() -> None:
    for config in (CONFIG, make_config(**SHAPES["puzzle-88b"])):
        assert ModelConfig.from_dict(config_json(config, "published")) == config
    assert CONFIG.num_kv_tensors == 4
    assert [CONFIG.full_window(layer) for layer in range(6)] == [0, 0, 40, 0, 40, 0]


def test_the_size_of_the_published_model() -> None:
    """88 billion parameters and, as its users report, 46.56 GiB of files."""
    config = make_config(**SHAPES["puzzle-88b"])
    assert round(config.num_parameters / 1e9, 1) == 88.2
    assert [config.layer_windows.count(window) for window in (0, 128, 8192)] == [10, 18, 8]
    assert [config.layer_experts.count(experts) for experts in (64, 128)] == [18, 18]


def test_it_stops_at_every_end_of_gpt_oss() -> None:
    """Its generation_config.json leaves out <|call|>, which ends a call of a tool."""
    config = ModelConfig.from_dict(published(), generation={"eos_token_id": [200002, 199999]})
    assert config.eos_token_ids == (200002, 199999, 200012)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"block_configs": None}, "block_configs"),
        ({"block_configs": [{"num_local_experts": 8, "sliding_window": 12}]}, "block_configs"),
        ({"block_configs": [{"num_local_experts": 8}] * 6}, "block_configs[0]"),
        ({"block_configs": [{"num_local_experts": 0, "sliding_window": 12}] * 6}, "num_local_experts"),
        ({"block_configs": [{"num_local_experts": 8, "sliding_window": -1}] * 6}, "sliding_window"),
        ({"block_configs": [{"num_local_experts": 3, "sliding_window": 12}] * 6}, "num_experts_per_tok"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types[0]"),
        ({"architectures": ["GptOssForCausalLM"]}, "architectures"),
    ],
)
def test_faults_of_config_json(change: dict[str, Any], key: str) -> None:
    raw = {**published(), "layer_types": None, **change}
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_dict(raw)
    assert caught.value.param == key


def test_a_block_may_not_have_other_sizes() -> None:
    raw = published()
    for key, value in (("num_experts_per_tok", 4), ("intermediate_size", CONFIG.intermediate_size)):
        raw["block_configs"][1][key] = value
    assert ModelConfig.from_dict(raw) == CONFIG
    raw["block_configs"][1]["intermediate_size"] = 32
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_dict(raw)
    assert caught.value.param == "block_configs[1].intermediate_size"


def test_whole_experts_cannot_be_shared_out() -> None:
    config = EngineConfig(tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="--enable-expert-parallel"):
        resolve(config, CONFIG, Hardware("cpu", "cpu", 2**34, 2**34))


def test_a_scale_that_is_not_one(tmp_path: Path) -> None:
    folder = write(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.2.self_attn.v_scale"
    path = folder / index["weight_map"][name]
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    begin, end = begin + 8 + length, end + 8 + length
    path.write_bytes(data[:begin] + bytes(end - begin) + data[end:])
    with pytest.raises(ConfigError, match=name):
        with_kv_scales(folder, ModelConfig.load(folder))
