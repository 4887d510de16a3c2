"""What a head's configuration says: for which target it is, which states it reads, how it rotates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.errors import ConfigError
from chorale.model.config import RopeConfig
from chorale.model.config_writer import SHAPES, make_config
from chorale.model.draft.config import Llama3Rope
from chorale.model.draft.files import HeadFiles
from chorale.model.draft.load import Target
from chorale.model.draft.parse import check_size, read_head_config
from chorale.runtime.sizing.memory import head_bytes, head_kv_bytes
from tests.model.draft.draft_files import HeadFile, final_state, nvidia, specforge, speculators
from tests.model.draft.test_styles import load, target_config

# ------------------------------------------------------------------ the other gpt-oss

SMALL, LARGE = (
    replace(target_config(), num_hidden_layers=n, layer_types=("full_attention",) * n) for n in (24, 36)
)


@pytest.mark.parametrize("ids", [[24, 30, 36], [1, 17, 33], [2, 18, 33]])
def test_a_head_of_120b_on_20b(ids: list[int]) -> None:
    config = nvidia(eagle_config={"eagle_aux_hidden_state_layer_ids": ids}).config
    read_head_config(config, "config.json", LARGE)
    with pytest.raises(ConfigError, match="the target has 24 layers; this head was made for another model"):
        read_head_config(config, "config.json", SMALL)


def test_a_head_that_names_its_target() -> None:
    config = speculators(eagle_aux_hidden_state_layer_ids=[2, 12, 21]).config
    config["speculators_config"]["verifier"]["name_or_path"] = "openai/gpt-oss-20b"
    read_head_config(config, "config.json", SMALL)
    with pytest.raises(ConfigError, match="'openai/gpt-oss-20b' is not for gpt-oss-120b, the target"):
        read_head_config(config, "config.json", LARGE)


@pytest.mark.parametrize(
    "name", ["nvidia/gpt-oss-120b-Eagle3-short-context", "/heads/GPT_OSS_120B", "EAGLE3-gpt-oss-120b-bf16"]
)
def test_a_name_of_the_other_size(name: str) -> None:
    check_size(name, LARGE, "x")
    check_size(name, target_config(), "x")  # a small stand-in may be called anything
    with pytest.raises(ConfigError, match="is not for gpt-oss-20b, the target"):
        check_size(name, SMALL, "x")


@pytest.mark.parametrize(
    "place", ["EAGLE3-gpt-oss-120b", "models--nvidia--gpt-oss-120b-Eagle3-short-context/snapshots/0a1b2c"]
)
def test_a_folder_of_the_other_size(place: str, tmp_path: Path) -> None:
    """A head that takes the final state has no number that shows for which of the two it is."""
    folder = final_state().write(tmp_path / "gpt-oss-20b" / place)
    load(folder, Target(LARGE, embedding=torch.zeros(1)))
    with pytest.raises(ConfigError, match="is not for gpt-oss-20b, the target"):
        load(folder, Target(SMALL, embedding=torch.zeros(1)))


# ------------------------------------------------------------------ aux states

READINGS: list[tuple[Callable[..., HeadFile], object, int, tuple[int, ...], str]] = [
    (speculators, [2, 18, 33], 36, (2, 18, 33), "the format is speculators'"),
    (speculators, [1, 17, 33], 36, (1, 17, 33), "the format is speculators'"),
    (nvidia, [24, 30, 36], 36, (24, 30, 36), "36 is the end of the target"),
    (nvidia, [1, 17, 32], 36, (2, 18, 33), "layers: assumed, because the first is 1"),
    (specforge, [1, 11, 21], 24, (2, 12, 22), "layers: assumed, because the first is 1"),
    (specforge, [1, 12, 24], 24, (1, 12, 24), "24 is the end of the target"),
    (specforge, [2, 12, 21], 24, (2, 12, 21), "boundaries: assumed, because the first is not 1"),
    (specforge, None, 24, (2, 12, 21), "the usual boundaries"),
    (nvidia, [], 36, (2, 18, 33), "the usual boundaries"),
]


@pytest.mark.parametrize(("style", "ids", "layers", "boundaries", "why"), READINGS)
def test_boundaries(
    style: Callable[..., HeadFile], ids: object, layers: int, boundaries: tuple[int, ...], why: str
) -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    config = style(**{key: ids}).config if style is speculators else style(eagle_config={key: ids}).config
    target = SMALL if layers == 24 else LARGE
    found = read_head_config(config, "config.json", target)
    assert found.aux_boundaries == boundaries
    assert why in found.aux_source


def test_a_peagle_head_in_the_format_of_speculators() -> None:
    changes = {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "ptd_token_id": 7}
    found = read_head_config(speculators(**changes).config, "config.json", target_config())
    assert (found.kind, found.mask_token, found.aux_boundaries) == ("peagle", 7, (1, 2, 4))


def test_a_switch_that_is_absent_follows_from_the_tensors(tmp_path: Path) -> None:
    """A head whose configuration is older than its norm would only draft worse."""
    file = nvidia(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 4]})
    assert HeadFiles(file.write(tmp_path), target_config()).config.norm_before_fc
    assert not read_head_config(file.config, "config.json", target_config()).norm_before_fc


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope_of(rope: dict[str, Any], key: str = "rope_scaling") -> object:
    return read_head_config(specforge(**{key: rope}).config, "config.json", target_config()).rope


def test_rotary_embeddings() -> None:
    yarn = RopeConfig(theta=10000.0, factor=4.0, original_max_position=64, truncate=True)
    assert rope_of(YARN) == yarn
    assert rope_of({**YARN, "type": "yarn", "rope_type": None, "truncate": False}) == replace(
        yarn, truncate=False
    )
    assert rope_of({**YARN, "attention_factor": 1.5}) == replace(yarn, attention_factor=1.5)
    whole = {key: value for key, value in YARN.items() if not key.startswith("original")}
    assert rope_of(whole) == replace(yarn, original_max_position=4096)  # max_position_embeddings
    assert rope_of({**YARN, "beta_fast": 16.0, "beta_slow": 2.0}) == replace(
        yarn, beta_fast=16.0, beta_slow=2.0
    )
    llama = Llama3Rope(
        theta=7e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )
    assert rope_of({**LLAMA3, "rope_theta": 7e4}) == llama
    assert rope_of({**LLAMA3, "rope_theta": 7e4}, "rope_parameters") == llama


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "mscale: is not supported"),
        ({**YARN, "truncate": 1}, "truncate: must be true or false"),
        ({**YARN, "factor": 0.5}, "factor: must be 1 or more"),
        ({**YARN, "beta_fast": 1.0}, "beta_fast: must be more than beta_slow"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor: must be more than low_freq_factor"),
        ({**LLAMA3, "rope_theta": 1.0}, "rope_theta: must be more than 1"),
        ({**LLAMA3, "partial_rotary_factor": 0.5}, "partial_rotary_factor: must be 1"),
    ],
)
def test_rotary_embeddings_that_are_refused(rope: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        rope_of(rope)


def test_defaults_of_llama() -> None:
    raw = specforge().config
    for key in ("rms_norm_eps", "max_position_embeddings", "rope_scaling", "num_key_value_heads"):
        del raw[key]
    found = read_head_config(raw, "config.json", target_config())
    assert (found.rms_norm_eps, found.max_position_embeddings) == (1e-6, 2048)
    assert found.rope == RopeConfig(theta=10000.0, factor=1.0)
    assert found.num_key_value_heads == found.num_attention_heads


def test_sizes_in_memory() -> None:
    """A published head: 565 MB that each pass reads, an fc of 50 MB, and an embedding."""
    config = nvidia(
        hidden_size=2880, head_dim=64, num_attention_heads=64, num_key_value_heads=8, intermediate_size=17280,
        vocab_size=201088, draft_vocab_size=32000, eagle_config={},
    ).config  # fmt: skip
    head = read_head_config(config, "config.json", make_config(**SHAPES["20b"]))
    own = 565_493_760 + 49_766_400 + 2 * 4 * 2880
    assert head_bytes(head, "bfloat16") == own + 2 * 201088 * 2880
    assert head_kv_bytes(head, 64, "bfloat16") == 64 * 2 * 8 * 64 * 2
