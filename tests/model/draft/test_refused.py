"""Files that are not a head for this target: refused, with what is wrong and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.errors import ConfigError
from chorale.model.draft.load import Target
from chorale.model.draft.parse import read_head_config
from tests.model.draft.draft_files import HeadFile, eagle31, final_state, nvidia, specforge, speculators
from tests.model.draft.test_styles import TARGET, load, target_config


def complaint(file: HeadFile, folder: Path, target: Target = TARGET) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file.write(folder), target)
    assert "\n" not in caught.value.message
    return caught.value.message


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "p-eagle by name": ({"architectures": ["PEagleDraftModel"]}, "mask_token_id: None"),
    "p-eagle of speculators": ({"speculators_model_type": "peagle"}, "transformer_layer_config"),
    "layers": ({"num_hidden_layers": 4}, "num_hidden_layers: 4: EAGLE3 heads have one layer"),
    "dflash2": ({"architectures": ["DFlash2DraftModel"]}, "'DFlash2DraftModel' is a drafter of another kind"),
    "medusa": ({"architectures": None, "medusa_num_heads": 4}, "'llama' is not a draft head"),
    "mtp": ({"architectures": ["DeepSeekMTPModel"]}, "'DeepSeekMTPModel' is a drafter of another kind"),
    "eagle 1": ({"architectures": ["LlamaForCausalLMEagle"]}, "is an EAGLE (1 or 2) head"),
    "a model": ({"architectures": ["GptOssForCausalLM"]}, "'GptOssForCausalLM' is not a draft head"),
    "nothing": ({"architectures": None, "model_type": None}, "names no architecture"),
}


CONFIGS: dict[str, tuple[HeadFile, str]] = {
    **{kind: (specforge(**changes), expected) for kind, (changes, expected) in KINDS.items()},
    "hidden size": (
        specforge(hidden_size=96),
        "hidden_size: 96, and the target's is 64: a head of another model",
    ),
    "target's hidden size": (
        speculators(target_hidden_size=128),
        "target_hidden_size: 128, and the target's is 64",
    ),
    "vocabulary": (specforge(vocab_size=600), "vocab_size: 600, and the target's is 512"),
    "draft vocabulary": (
        specforge(draft_vocab_size=201),
        "lm_head.weight: shape [200, 64], config.json says",
    ),
    "too many drafts": (specforge(draft_vocab_size=513), "draft_vocab_size: 513 is more than vocab_size 512"),
    "activation": (specforge(hidden_act="gelu"), "hidden_act: 'gelu' is not silu"),
    "biases of gates": (specforge(mlp_bias=True), "mlp_bias: true is not supported"),
    "not causal": (specforge(is_causal=False), "is_causal: false is not supported"),
    "tied": (specforge(tie_word_embeddings=True), "tie_word_embeddings: true is not supported"),
    "quantized": (
        specforge(quantization_config={"quant_method": "fp8"}),
        "quantized heads are not supported",
    ),
    "scaled logits": (specforge(logit_scale=0.5), "logit_scale: must be 1"),
    "a window": (specforge(layer_types=["sliding_attention"]), "layer_types: must be full_attention"),
    "rope": (specforge(rope_scaling={"rope_type": "longrope"}), "rope_type: 'longrope' is not one of"),
    "part of a head": (specforge(partial_rotary_factor=0.5), "partial_rotary_factor: must be 1"),
    "head dim": (specforge(head_dim=15), "head_dim: must be even"),
    "kv heads": (specforge(num_key_value_heads=3), "num_key_value_heads: must divide"),
    "a switch": (specforge(norm_before_residual="yes"), "norm_before_residual: must be true or false"),
    "a section": (speculators(transformer_layer_config=7), "transformer_layer_config: must be an object"),
    "twice": (speculators(eagle_aux_hidden_state_layer_ids=[1, 1, 2]), "a number appears twice"),
    "not numbers": (speculators(eagle_aux_hidden_state_layer_ids=[1, [2]]), "must be a list of numbers"),
    "ids": (speculators(eagle_aux_hidden_state_layer_ids=7), "must be a list of at most 16 numbers"),
    "many ids": (
        specforge(eagle_aux_hidden_state_layer_ids=list(range(17)), eagle_config={}),
        "at most 16 numbers",
    ),
    "number of states": (eagle31(num_aux_hidden_states=3), "num_aux_hidden_states: 3, but there are 4"),
    "states": (
        speculators(eagle_aux_hidden_state_layer_ids=[1, 2]),
        "fc.weight: shape [64, 192], config.json says [64, 128]",
    ),
    "deeper target": (
        speculators(eagle_aux_hidden_state_layer_ids=[2, 3, 5]),
        "[2, 3, 5]: the target has 4 layers; this head was made for another model",
    ),
    "a layer past the end": (
        specforge(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}),
        "the target has 4 layers",
    ),
    "off": (
        speculators(norm_before_fc=False),
        "norm_before_fc: is false, but the file has input_norm.weight",
    ),
    "each off": (eagle31(fc_norm=False), "fc_norm: is false, but the file has fc_norm.0.weight"),
    "on": (specforge(norm_before_fc=True), "input_norm.weight: missing"),
    "each on": (specforge(fc_norm=True), "fc_norm.0.weight: missing"),
    "first norm": (
        nvidia(eagle_config={"use_input_layernorm_in_first_layer": False}),
        "use_input_layernorm_in_first_layer: must be true",
    ),
    "parallel heads": (nvidia(eagle_config={"parallel_draft_step": 3}), "parallel_draft_step: 3: parallel"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations(case: str, tmp_path: Path) -> None:
    file, expected = CONFIGS[case]
    found = complaint(file, tmp_path)
    assert expected in found
    assert str(tmp_path) in found


def cut(name: str, rows: int) -> Callable[[HeadFile], None]:
    def change(file: HeadFile) -> None:
        file.tensors[name] = file.tensors[name][:rows].clone()

    return change


def put(name: str, tensor: torch.Tensor) -> Callable[[HeadFile], None]:
    return lambda file: file.tensors.update({name: tensor})


def left_out(name: str) -> Callable[[HeadFile], None]:
    return lambda file: void(file.tensors.pop(name))


def void(_: object) -> None:
    return None


TENSORS: dict[str, tuple[Callable[[HeadFile], None], str]] = {
    "missing": (left_out("midlayer.mlp.up_proj.weight"), ": layers.0.mlp.up_proj.weight: missing"),
    "no norm of the state": (left_out("midlayer.hidden_norm.weight"), "hidden_norm.weight: missing"),
    "no ids": (left_out("d2t"), ": d2t: missing: draft_vocab_size is 200 of 512"),
    "a mask for parallel drafts": (put("mask_hidden", torch.zeros(1, 3)), "mask_token_id: None"),
    "shape": (
        cut("midlayer.self_attn.k_proj.weight", 16),
        "midlayer.self_attn.k_proj.weight: shape [16, 128], config.json says [32, 128]",
    ),
    "unknown": (put("midlayer.self_attn.sinks", torch.zeros(8)), "sinks: not a tensor of an EAGLE3 head"),
    "a second layer": (put("layers.1.mlp.up_proj.weight", torch.zeros(80, 64)), "head of one layer"),
    "experts": (put("midlayer.mlp.router.weight", torch.zeros(8, 64)), "not a tensor of an EAGLE3 head"),
    "two names": (put("layers.0.hidden_norm.weight", torch.ones(64)), "is also called"),
    "integers": (put("norm.weight", torch.ones(64, dtype=torch.int64)), "norm.weight: dtype I64, must be"),
    "ids in floats": (put("d2t", torch.zeros(200)), "d2t: dtype F32, must be I32 or I64"),
    "ids too large": (put("d2t", torch.full((200,), 400)), "d2t: an id plus its difference is not from 0"),
    "ids themselves": (
        put("d2t", torch.arange(0, 400, 2)),
        "d2t: an id plus its difference is not from 0 to 511",
    ),
    "ids twice": (put("d2t", torch.tensor([0, -1] * 100)), "d2t: two draft ids are the same target id"),
    "a short mask": (
        put("t2d", torch.ones(400, dtype=torch.bool)),
        "t2d: shape [400], config.json says [512]",
    ),
    "another mask": (
        put("t2d", torch.zeros(512, dtype=torch.bool).index_fill(0, torch.arange(200), True)),
        "t2d: is not the mask of the ids that d2t gives",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case: str, tmp_path: Path) -> None:
    change, expected = TENSORS[case]
    file = specforge()
    change(file)
    found = complaint(file, tmp_path)
    assert expected in found
    assert str(tmp_path) in found


def test_aux_tensors_without_aux_states(tmp_path: Path) -> None:
    file = final_state()
    file.tensors["fc.weight"] = torch.zeros(64, 192)
    assert "not a tensor of an EAGLE3 head without aux states" in complaint(file, tmp_path)


def test_leftover_tensors_of_trainers_are_not_read(tmp_path: Path) -> None:
    file = speculators()
    file.tensors["verifier_lm_head.weight"] = torch.zeros(3, 3)
    file.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    load(file.write(tmp_path))


def test_no_embedding_anywhere(tmp_path: Path) -> None:
    found = complaint(nvidia(), tmp_path, Target(target_config()))
    assert "embed_tokens.weight: missing, and the target's is not available" in found


def test_an_embedding_of_another_width(tmp_path: Path) -> None:
    target = Target(replace(target_config(), hidden_size=128), embedding=torch.zeros(512, 128))
    file = speculators(target_hidden_size=128)
    del file.tensors["embed_tokens.weight"]
    file.tensors["fc.weight"] = torch.zeros(64, 3 * 128)
    file.tensors["input_norm.weight"] = torch.zeros(3 * 128)
    assert "embed_tokens.weight: missing, and the target's is 128 wide, not 64" in complaint(
        file, tmp_path, target
    )


def test_pickles_and_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(specforge().config))
    with pytest.raises(ConfigError, match="holds no safetensors file"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: a pickle, which can run code"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json: not a file"):
        load(tmp_path / "none")


@pytest.mark.parametrize("junk", [7, -1, 1e40, "x", [], [1], {}, {"a": 1}, True, False])
@pytest.mark.parametrize("style", [speculators, nvidia])
def test_junk_in_any_field_is_refused_or_harmless(style: Callable[[], HeadFile], junk: object) -> None:
    whole = style().config
    for section in (None, "transformer_layer_config", "eagle_config", "rope_scaling", "speculators_config"):
        inner = whole if section is None else whole.get(section)
        for key in inner if isinstance(inner, dict) else ():
            raw = json.loads(json.dumps(whole))
            (raw if section is None else raw[section])[key] = junk
            with suppress(ConfigError):
                read_head_config(raw, "config.json", target_config())
