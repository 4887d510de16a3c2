"""config.json: every spelling is read, and every fault names its key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from chorale.errors import ModelConfigError
from chorale.model.config import FULL, WINDOW, ModelConfig
from chorale.model.config_writer import GENERATION_CONFIG, SHAPES, config_json, make_config

CONFIG = make_config(**SHAPES["20b"])


def published(**changes: Any) -> dict[str, Any]:
    """The published 20b config.json with some keys changed; None removes."""
    raw = {**config_json(CONFIG, "published"), **changes}
    return {key: value for key, value in raw.items() if value is not None}


def rope(**changes: Any) -> dict[str, Any]:
    raw = {**published()["rope_scaling"], **changes}
    return {key: value for key, value in raw.items() if value is not None}


def test_published() -> None:
    config = ModelConfig.from_dict(published(), generation=GENERATION_CONFIG)
    assert config == CONFIG
    assert config.eos_token_ids == (200002, 199999, 200012)
    assert config.rope.concentration == pytest.approx(1.3465735902799727)
    assert round(config.num_parameters / 1e9, 1) == 20.9
    assert round(make_config(**SHAPES["120b"]).num_parameters / 1e9, 1) == 116.8


def test_reference_layout_and_newer_rope_form() -> None:
    assert ModelConfig.from_dict(config_json(CONFIG, "reference")) == CONFIG
    newer = published(rope_scaling=None, rope_theta=None, rope_parameters={**rope(), "rope_theta": 150000.0})
    assert ModelConfig.from_dict(newer, generation=GENERATION_CONFIG) == CONFIG


@pytest.mark.parametrize(("given", "read"), [(None, True), (True, True), (False, False)])
def test_the_ramp_is_truncated_unless_the_file_says_otherwise(given: bool | None, read: bool) -> None:
    """transformers' own default; the published file says false."""
    assert ModelConfig.from_dict(published(rope_scaling=rope(truncate=given))).rope.truncate is read


def test_transformers_own_file(tmp_path: Path) -> None:
    """What transformers writes when it saves a gpt-oss configuration."""
    from transformers import GptOssConfig

    GptOssConfig(**config_json(CONFIG, "dense")).save_pretrained(tmp_path)
    loaded = ModelConfig.load(tmp_path)
    assert loaded.rope == CONFIG.rope
    assert loaded.layer_types == CONFIG.layer_types
    assert loaded.num_local_experts == CONFIG.num_local_experts


def test_aliases() -> None:
    raw = published(num_experts_per_tok=None, num_local_experts=None, num_experts=32)
    assert ModelConfig.from_dict(raw, generation=GENERATION_CONFIG) == CONFIG


def test_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published()))
    assert ModelConfig.load(tmp_path).eos_token_ids == (200002,)
    generation = {"eos_token_id": [1, 2, 1], "temperature": 0.7, "top_k": 40, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    loaded = ModelConfig.load(tmp_path)
    assert loaded.eos_token_ids == (1, 2)
    assert loaded.default_sampling == {"temperature": 0.7, "top_k": 40.0}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", "</s>"),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 3),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", 10**400),
    ],
)
def test_bad_values_of_generation_config_name_it(key: str, value: object) -> None:
    with pytest.raises(ModelConfigError, match=f"^generation_config.json: {key}: "):
        ModelConfig.from_dict(published(), generation={key: value})


def test_what_generation_config_leaves_open() -> None:
    generation = {"eos_token_id": None, "top_k": -1, "min_p": None}
    config = ModelConfig.from_dict(published(), generation=generation)
    assert config.eos_token_ids == (200002,)
    assert config.default_sampling == {"top_k": -1.0}


def test_layer_slots() -> None:
    config = make_config(
        **{**SHAPES["20b"], "layers": 5},
        layer_types=(
            "sliding_attention",
            "full_attention",
            "full_attention",
            "full_attention",
            "sliding_attention",
        ),
    )
    slots = [config.place_of(layer)[:2] for layer in range(5)]
    assert slots == [(WINDOW, 0), (FULL, 0), (FULL, 1), (FULL, 2), (WINDOW, 1)]
    assert config.num_kv_tensors == 3
    assert CONFIG.num_kv_tensors == 12


REQUIRED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_local_experts", "vocab_size", "sliding_window", "rope_theta", "rope_scaling",
)  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(ModelConfigError, match=f"{key}: is missing"):
        ModelConfig.from_dict(published(**{key: None}))


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("model_type", {"model_type": "llama"}),
        ("architectures", {"architectures": ["LlamaForCausalLM"]}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("tie_word_embeddings", {"tie_word_embeddings": True}),
        ("attention_bias", {"attention_bias": False}),
        ("quantization_config.quant_method", {"quantization_config": {"quant_method": "gptq"}}),
        ("hidden_size", {"hidden_size": 2881}),
        ("hidden_size", {"hidden_size": "2880"}),
        ("hidden_size", {"hidden_size": True}),
        ("hidden_size", {"hidden_size": 2**40}),
        ("intermediate_size", {"intermediate_size": 100}),
        ("num_key_value_heads", {"num_key_value_heads": 7}),
        ("head_dim", {"head_dim": 63}),
        ("num_experts_per_tok", {"num_experts_per_tok": 33}),
        ("num_experts_per_tok", {"num_experts_per_tok": 0}),
        ("vocab_size", {"vocab_size": -1}),
        ("sliding_window", {"sliding_window": 0}),
        ("layer_types", {"layer_types": ["full_attention"]}),
        ("layer_types", {"layer_types": "full_attention"}),
        ("layer_types[3]", {"layer_types": [*["full_attention"] * 3, "mamba", *["full_attention"] * 20]}),
        ("layer_types[0]", {"layer_types": [["full_attention"]] * 24}),
        ("num_hidden_layers", {"num_hidden_layers": 2**31 - 1, "layer_types": None}),
        ("rope_type", {"rope_scaling": rope(rope_type="linear")}),
        ("rope_type", {"rope_scaling": rope(rope_type=None)}),
        ("factor", {"rope_scaling": rope(factor=None)}),
        ("factor", {"rope_scaling": rope(factor=0.5)}),
        ("original_max_position_embeddings", {"rope_scaling": rope(original_max_position_embeddings=None)}),
        ("beta_fast", {"rope_scaling": rope(beta_fast=0.5)}),
        ("truncate", {"rope_scaling": rope(truncate="no")}),
        ("mscale", {"rope_scaling": rope(mscale=1.0, mscale_all_dim=0.5)}),
        ("partial_rotary_factor", {"rope_scaling": rope(partial_rotary_factor=0.5)}),
        ("rope_theta", {"rope_theta": 0}),
        ("rope_theta", {"rope_theta": float("nan")}),
        ("rope_theta", {"rope_theta": 10**400}),
        ("factor", {"rope_scaling": rope(factor=1e308)}),
        ("rms_norm_eps", {"rms_norm_eps": -1e-5}),
        ("rms_norm_eps", {"rms_norm_eps": float("inf")}),
        ("swiglu_limit", {"swiglu_limit": "7"}),
        ("eos_token_id", {"eos_token_id": ["</s>"]}),
        ("eos_token_id", {"eos_token_id": []}),
    ],
)
def test_bad_values_name_their_key(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError) as error:
        ModelConfig.from_dict(published(**changes), where="config.json")
    assert key in error.value.message
    assert error.value.message.startswith("config.json: ")


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000, "\x00"])
def test_unreadable_files_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_a_pipe_and_a_link_to_nothing_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published()))
    generation = tmp_path / "generation_config.json"
    os.mkfifo(generation)
    with pytest.raises(ModelConfigError, match=r"generation_config\.json: not a file"):
        ModelConfig.load(tmp_path)
    generation.unlink()
    generation.symlink_to("../../blobs/removed")
    with pytest.raises(ModelConfigError, match=r"generation_config\.json: not a file, or a broken link"):
        ModelConfig.load(tmp_path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="no such file"):
        ModelConfig.load(tmp_path)
