"""The checkpoints that AMD's quantizer writes for gpt-oss: MXFP4 experts one by one, with e4m3 scales."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorale.config.engine import EngineConfig
from chorale.errors import CheckpointError, ConfigError, ModelConfigError
from chorale.kernels import select_ops
from chorale.kernels.ops import ExpertTensors
from chorale.machine.hardware import Hardware
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.checkpoint import Checkpoint
from chorale.model.config import ModelConfig
from chorale.model.config_writer import make_config
from chorale.model.weights import Target, load_weights
from chorale.runtime.sizing.resolve import resolve
from tests.support.device.model import SMALL, load_model, prompt
from tests.support.device.paged import PagedRunner

CONFIG = make_config(**{**SMALL, "layers": 2, "experts": 5, "vocab": 512})
SHARD = "model-00002-of-00003.safetensors"
EXPERT = "model.layers.1.mlp.experts.3."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_checkpoint(tmp_path / "quark", CONFIG, layout="quark")


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SHARD).items()}
    change(tensors)
    save_file(tensors, folder / SHARD)


def load(folder: Path, **options: Any) -> list[ExpertTensors]:
    """What each layer's experts are packed from."""
    seen: list[ExpertTensors] = []
    ops = select_ops("reference", "cpu")
    ops = dataclasses.replace(ops, pack_experts=seen.append)
    load_weights(folder, Target(ModelConfig.load(folder), ops, torch.float32, **options))
    return seen


def test_names_shapes_and_types_are_those_of_the_published_files(folder: Path) -> None:
    assert Checkpoint(folder, CONFIG).layout == "quark"
    tensors = load_file(folder / SHARD)
    shapes = {name[len(EXPERT) :]: t for name, t in tensors.items() if name.startswith(EXPERT)}
    found = {name: (tuple(t.shape), t.dtype) for name, t in shapes.items()}
    inputs, inner = 64, 96
    assert found == {
        "gate_up_proj.weight": ((2 * inner, inputs // 2), torch.uint8),
        "gate_up_proj.weight_scale": ((2 * inner, inputs // 32), torch.uint8),
        "gate_up_proj.bias": ((2 * inner,), torch.bfloat16),
        "gate_up_proj.input_scale": ((), torch.float32),
        "down_proj.weight": ((inputs, inner // 2), torch.uint8),
        "down_proj.weight_scale": ((inputs, inner // 32), torch.uint8),
        "down_proj.bias": ((inputs,), torch.bfloat16),
        "down_proj.input_scale": ((), torch.float32),
    }


def test_it_is_the_model_that_the_published_layout_holds(folder: Path, tmp_path: Path) -> None:
    published = write_random_checkpoint(tmp_path / "published", CONFIG)
    tokens = prompt(40)
    found, expected = (PagedRunner(load_model(each)).run(tokens) for each in (folder, published))
    assert torch.equal(found, expected)


def test_a_layers_scale_is_its_experts_largest(folder: Path) -> None:
    edit(folder, lambda t: t.update({EXPERT + "down_proj.input_scale": torch.tensor([0.75])}))  # shape [1]
    layers = load(folder, fp8_activations=True)
    assert [layer.gate_up_input_scale for layer in layers] == [1.5 / 32, 1.5 / 32]
    assert [layer.down_input_scale for layer in layers] == [1.5 / 16, 0.75]
    assert all(layer.fp8_activations for layer in layers)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_input_scale_is_refused(folder: Path, value: float) -> None:
    edit(folder, lambda t: t.update({EXPERT + "gate_up_proj.input_scale": torch.tensor(value)}))
    with pytest.raises(CheckpointError, match=r"layer 1: gate_up_proj.input_scale"):
        load(folder)


def test_a_missing_or_misshapen_tensor_is_named(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.unlink()
    name = EXPERT + "down_proj.weight_scale"
    edit(folder, lambda t: t.update({name: t[name][:, :1].contiguous()}))
    with pytest.raises(CheckpointError, match=f"{name}: shape"):
        load(folder)
    edit(folder, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"{name}: missing"):
        load(folder)


def test_without_fp8_activations_a_note_says_that_the_scales_are_ignored(folder: Path) -> None:
    config, gpu = ModelConfig.load(folder), Hardware("cuda", "H200", 2**37, 2**37)
    assert config.expert_input_scales
    assert not config.dense_experts
    (note,) = resolve(EngineConfig(), config, gpu).notes
    assert "--moe-activation-dtype fp8" in note
    assert resolve(EngineConfig(moe_activation_dtype="fp8"), config, gpu).notes == ()
    ops = select_ops("reference", "cpu")
    with pytest.raises(ConfigError, match="needs --ops triton and a Hopper GPU"):
        load_weights(folder, Target(config, ops, torch.float32, fp8_activations=True))


FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": True}


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        (("global_quant_config", "weight", "dtype"), "fp8_e4m3", "dtype"),
        (("global_quant_config", "weight", "group_size"), 16, "group_size"),
        (("global_quant_config", "weight"), None, "weight"),
        (("global_quant_config", "input_tensors"), FP4, "dtype"),
        (("global_quant_config", "input_tensors", "is_dynamic"), True, "is_dynamic"),
        (("global_quant_config", "output_tensors"), FP4, "output_tensors"),
        (("layer_quant_config",), {"*self_attn*": {"weight": FP4}}, "layer_quant_config"),
        (("kv_cache_quant_config",), {"*k_proj": {}}, "kv_cache_quant_config"),
        (("export",), {"weight_format": "fake_quantized"}, "weight_format"),
        (("global_quant_config",), None, "global_quant_config"),
    ],
)
def test_other_kinds_are_refused_by_key(folder: Path, path: tuple[str, ...], value: object, key: str) -> None:
    raw = json.loads((folder / "config.json").read_text())
    place = raw["quantization_config"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelConfigError, match=key):
        ModelConfig.load(folder)
