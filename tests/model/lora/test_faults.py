"""Every adapter that would not do what its trainer did is refused when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.errors import AdapterError
from chorale.model.config_writer import make_config
from chorale.model.lora.read import read_adapter
from tests.support.device.lora import RANK, Draft, attention, parameters, tinker, unsloth, write_folder
from tests.support.device.model import SMALL

CONFIG = make_config(**{**SMALL, "layers": 2})
LAYER = "base_model.model.model.layers.0"
Change = Callable[[Draft], dict[str, Any]]


def refusal(folder: Path, form: Change = attention, change: Change | None = None, **config: Any) -> str:
    draft = Draft(CONFIG)
    given = form(draft) | config | ((change and change(draft)) or {})
    draft.write(folder, **given)
    with pytest.raises(AdapterError) as fault:
        read_adapter(folder, CONFIG)
    assert str(folder) in fault.value.message, "names the file"
    assert fault.value.status == 400
    return fault.value.message


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("use_dora", True, "DoRA"),
        ("use_qalora", True, "QALoRA"),
        ("alora_invocation_tokens", [1, 2], "aLoRA"),
        ("layer_replication", [[0, 1]], "layer_replication"),
        ("trainable_token_indices", [3], "trainable_token_indices"),
        ("something_new", {"a": 1}, "something_new"),
        ("peft_type", "LOHA", "LOHA"),
        ("bias", "all", "bias"),
        ("fan_in_fan_out", True, "fan_in_fan_out"),
        ("init_lora_weights", "pissa_niter_4", "pissa"),
        ("modules_to_save", ["embed_tokens"], "embed_tokens"),
        ("modules_to_save", ["lm_head"], "lm_head.weight"),  # and the file lacks it
        ("rank_pattern", {"(a+)+b": 4}, "regular expression"),
        ("alpha_pattern", {"q_proj": -1}, "q_proj"),
        ("r", 257, "257"),
        ("r", 0, "r:"),
        ("r", 8, "rank 4"),  # the tensors have 4
        ("lora_alpha", None, "lora_alpha"),
    ],
)
def test_a_configuration_that_is_not_applied(tmp_path: Path, key: str, value: Any, named: str) -> None:
    assert named in refusal(tmp_path, **{key: value})


@pytest.mark.parametrize(
    ("form", "name", "shape", "named"),
    [
        (attention, f"{LAYER}.self_attn.q_proj.lora_A.weight", None, "lora_A"),  # half of a pair
        (attention, f"{LAYER}.self_attn.q_proj.lora_B.weight", (128, RANK + 1), "[128, 4]"),
        (attention, f"{LAYER}.self_attn.q_proj.lora_A.weight", (RANK, 32), "shape"),
        (attention, f"{LAYER}.mlp.gate.lora_A.weight", (RANK, 64), "mlp.gate"),  # unknown name
        (attention, f"{LAYER}.self_attn.q_proj.lora_A.bias", (RANK,), "lora_A.bias"),
        (attention, "base_model.model.model.embed_tokens.weight", (8, 8), "embed_tokens"),
        (attention, "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight", (RANK, 64), "2 layers"),
        (attention, "base_model.model.lm_head.weight", (512, 64), "modules_to_save"),
        (attention, "base_model.model.lm_head.base_layer.weight", (512, 64), "lm_head"),
        (unsloth, f"{LAYER}.mlp.experts.down_projs.8.lora_A.weight", (RANK, 96), "8 experts"),
        (unsloth, f"{LAYER}.mlp.experts.lora_A.weight", (RANK * 8, 96), "lora_B"),
        (tinker, f"{LAYER}.mlp.experts.0.gate_proj.lora_B.weight", None, "lora_B"),
        (parameters, f"{LAYER}.mlp.experts.lora_A.weight", (RANK * 8 + 1, 96), "33"),
        (parameters, f"{LAYER}.mlp.experts.lora_A.weight", (RANK * 8, 95), "neither"),
    ],
)
def test_a_tensor_that_does_not_fit(
    tmp_path: Path, form: Change, name: str, shape: tuple[int, ...] | None, named: str
) -> None:
    def change(draft: Draft) -> dict[str, Any]:
        if shape is None:
            del draft.tensors[name]
        else:
            draft.tensors[name] = draft.draw(*shape)
        return {}

    assert named in refusal(tmp_path, form, change)


def test_an_adapter_without_effect(tmp_path: Path) -> None:
    def no_b(draft: Draft) -> dict[str, Any]:
        for name, tensor in draft.tensors.items():
            tensor *= 0 if "lora_B" in name else 1
        return {}

    assert "changes nothing" in refusal(tmp_path, attention, no_b)
    assert "changes nothing" in refusal(tmp_path, parameters, no_b)


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    def overflow(draft: Draft) -> dict[str, Any]:
        next(iter(draft.tensors.values()))[0] = torch.inf
        return {}

    assert "not finite" in refusal(tmp_path, attention, overflow)


def test_a_module_that_one_layer_lacks(tmp_path: Path) -> None:
    """An adapter of the 20b fits the first layers of the 120b."""

    def shorten(draft: Draft) -> dict[str, Any]:
        draft.tensors = {name: each for name, each in draft.tensors.items() if "layers.1." not in name}
        return {}

    assert "layer 1" in refusal(tmp_path, attention, shorten)
    draft = Draft(CONFIG)
    draft.write(tmp_path, **attention(draft), **shorten(draft), layers_to_transform=[0])
    assert read_adapter(tmp_path, CONFIG).layers[1].qkv == ()


def test_the_other_published_size(tmp_path: Path) -> None:
    large = make_config(**{**SMALL, "layers": 36})
    draft = Draft(large)
    folder = draft.write(tmp_path, **attention(draft), base_model_name_or_path="openai/gpt-oss-20b")
    with pytest.raises(AdapterError, match="36"):
        read_adapter(folder, large)


def test_square_experts_need_gate_up_to_show_their_order(tmp_path: Path) -> None:
    square = make_config(**{**SMALL, "layers": 1, "inter": 64})
    draft, experts = Draft(square), "model.layers.0.mlp.experts"
    draft.stacked(experts, "down_proj", experts)
    with pytest.raises(AdapterError, match="gate_up_proj"):
        read_adapter(draft.write(tmp_path / "unclear"), square)
    assert (
        read_adapter(draft.write(tmp_path / "old", peft_version="0.17.1"), square).layers[0].down is not None
    )
    draft.stacked(experts, "gate_up_proj", f"{experts}.base_layer")
    assert read_adapter(draft.write(tmp_path / "both"), square).layers[0].down is not None


def test_files_that_are_missing_or_hostile(tmp_path: Path) -> None:
    with pytest.raises(AdapterError):
        read_adapter(tmp_path / "none", CONFIG)
    folder = write_folder(tmp_path / "pickle", {"a": torch.zeros(1)})
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="pickled"):
        read_adapter(folder, CONFIG)
    (folder / "adapter_model.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{")
    with pytest.raises(AdapterError, match="header"):
        read_adapter(folder, CONFIG)


def test_patterns_of_rank_and_alpha(tmp_path: Path) -> None:
    draft = Draft(CONFIG)
    config = attention(draft)
    patterns = {"rank_pattern": {"q_proj": RANK}, "alpha_pattern": {"layers.1.self_attn.q_proj": 48}}
    draft.write(tmp_path, **config, **patterns, r=16, lora_alpha=6, use_rslora=True)
    with pytest.raises(AdapterError, match="rank 4"):
        read_adapter(tmp_path, CONFIG)  # k_proj does not have 16
    draft.write(tmp_path, **config, **patterns, use_rslora=True)
    layers = read_adapter(tmp_path, CONFIG).layers
    raw = draft.tensors[f"{LAYER.replace('0', '1')}.self_attn.q_proj.lora_B.weight"]
    assert torch.equal(layers[1].qkv[0].b, raw * 24)  # 48 / sqrt(4)
    assert not torch.equal(layers[0].qkv[0].b, raw * 24)
