"""Heads that are written, and read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.model.draft.config import HeadConfig, Llama3Rope, small_head
from chorale.model.draft.head import DraftHead
from chorale.model.draft.load import Target, load_head
from chorale.model.draft.pack import weight_shapes
from chorale.model.draft.random_head import random_head
from tests.model.draft import draft_files as files
from tests.model.draft.test_styles import run, target_config
from tests.support.device.draft_writer import STYLES, Style, write_random_head

PLAIN = small_head(target_config(), draft_vocab_size=200, max_position_embeddings=64)
CONFIGS = {
    "plain": PLAIN,
    "normed": replace(PLAIN, norm_before_fc=True, norm_before_residual=True, norm_output=True),
    "each": replace(PLAIN, aux_norms=True, aux_boundaries=(0, 1, 3, 4), rms_norm_eps=1e-4),
    "final": replace(PLAIN, aux_boundaries=(), draft_vocab_size=512),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_written_head_is_the_same_head(config: HeadConfig, style: Style, tmp_path: Path) -> None:
    folder = write_random_head(tmp_path, config, style=style, seed=3)
    target = Target(target_config())
    found = load_head(folder, target, REFERENCE_OPS, device="cpu", dtype=torch.float32)
    expected = random_head(config, REFERENCE_OPS, seed=3)
    assert replace(found.config, aux_source="") == config
    assert torch.equal(found.token_ids, expected.token_ids)
    aux, ids = files.randn(9, config.aux_width, seed=1), torch.arange(9) * 31
    states = expected.project(aux)
    assert torch.equal(found.project(aux), states)
    x = run(expected, states, ids, 9)
    assert torch.equal(run(found, states, ids, 9), x)
    assert torch.equal(found.logits(x, torch.arange(9)), expected.logits(x, torch.arange(9)))
    assert torch.equal(found.next_states(x), expected.next_states(x))


def test_without_an_embedding(tmp_path: Path) -> None:
    folder = write_random_head(tmp_path, PLAIN, embedding=False)
    target = Target(target_config(), embedding=torch.zeros(512, 64))
    head = load_head(folder, target, REFERENCE_OPS, device="cpu", dtype=torch.float32)
    assert head.weights.embedding is target.embedding


def test_shapes_without_a_file() -> None:
    """Meta tensors run through a head: what kernels are compiled for before there are weights."""
    config = CONFIGS["normed"]
    head = DraftHead(config, weight_shapes(config, REFERENCE_OPS, torch.bfloat16), REFERENCE_OPS, 64)
    expected = random_head(config, REFERENCE_OPS, dtype=torch.bfloat16)
    layers, drawn = head.weights.layers[0], expected.weights.layers[0]
    for name in ("embedding", "aux_norm", "final_norm", "token_ids"):
        found, made = getattr(head.weights, name), getattr(expected.weights, name)
        assert (found.shape, found.dtype, found.device.type) == (made.shape, made.dtype, "meta")
    pairs = [(layers, drawn, name) for name in ("qkv", "output", "gate_up", "down")]
    for ours, theirs, name in (*pairs, (head.weights, expected.weights, "fc")):
        found, made = getattr(ours, name).weight, getattr(theirs, name).weight
        assert (found.shape, found.dtype) == (made.shape, made.dtype)
    states = head.project(torch.empty(3, config.aux_width, device="meta"))
    assert head.logits(states, torch.arange(3, device="meta")).shape == (3, config.draft_vocab_size)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    scaled = Llama3Rope(
        theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )
    with pytest.raises(ValueError, match="plain rotary"):
        write_random_head(tmp_path, replace(PLAIN, rope=scaled))
    with pytest.raises(ValueError, match="read as layers"):
        write_random_head(tmp_path, replace(PLAIN, aux_boundaries=(1, 2)), style="midlayer")
