"""Heads of every file style, loaded and run, against a plain forward of what was written."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chorale.errors import ConfigError
from chorale.kernels.ops import AttentionMeta
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.model.config import ModelConfig, RopeConfig
from chorale.model.config_writer import make_config
from chorale.model.draft.config import small_head
from chorale.model.draft.head import DraftHead, head_rope_table
from chorale.model.draft.load import Target, load_head
from chorale.model.draft.pack import weight_shapes
from chorale.model.draft.random_head import random_head
from tests.model.draft import draft_files as files
from tests.model.draft.draft_files import STYLES, HeadFile, forward, states_of

LENGTH, BLOCK = 37, 8


def target_config() -> ModelConfig:
    return make_config(
        layers=files.LAYERS, experts=8, hidden=files.HIDDEN, inter=96, heads=8, kv_heads=2, head_dim=16,
        vocab=files.VOCAB,
    )  # fmt: skip


EMBEDDING = files.randn(files.VOCAB, files.HIDDEN, seed=999)
TARGET = Target(target_config(), embedding=EMBEDDING)


def load(folder: Path, target: Target = TARGET, dtype: torch.dtype = torch.float32) -> DraftHead:
    return load_head(folder, target, REFERENCE_OPS, device="cpu", dtype=dtype, max_len=64)


def meta_of(begin: int, end: int) -> AttentionMeta:
    """One sequence, in blocks in falling order."""
    table = torch.arange(9, -1, -1, dtype=torch.int32).unsqueeze(0)
    positions = torch.arange(begin, end)
    slots = table[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
    starts, contexts = (torch.tensor(n, dtype=torch.int32) for n in ([0, end - begin], [end]))
    return AttentionMeta(positions, starts, contexts, (table, table), (slots, slots), end - begin, end)


def run(head: DraftHead, states: torch.Tensor, token_ids: torch.Tensor, chunk: int) -> torch.Tensor:
    kv = torch.zeros(head.kv_shape(10, BLOCK))
    cuts = [(begin, min(begin + chunk, len(states))) for begin in range(0, len(states), chunk)]
    return torch.cat([head.run(states[a:b], token_ids[a:b], meta_of(a, b), kv) for a, b in cuts])


def inputs_of(file: HeadFile) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(states of the target, tokens, the embedding in use)"""
    aux = 2 * files.randn(LENGTH, max(file.num_states, 1) * files.HIDDEN, seed=11)
    token_ids = torch.randint(0, files.VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(12))
    own = [tensor for name, tensor in file.tensors.items() if name.endswith("embed_tokens.weight")]
    return aux, token_ids, own[0] if own else EMBEDDING


def check(head: DraftHead, file: HeadFile, chunk: int, tolerance: float = 1e-4) -> None:
    aux, token_ids, embedding = inputs_of(file)
    states = states_of(file, aux)
    torch.testing.assert_close(head.project(aux), states, rtol=tolerance, atol=tolerance)
    expected, logits, following = forward(file, states, token_ids, embedding)
    x = run(head, head.project(aux), token_ids, chunk)
    every = torch.arange(LENGTH)
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(head.logits(x, every), logits, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(head.logits(x, every[5:7]), logits[5:7], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(head.next_states(x), following, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [LENGTH, 7, 1])
@pytest.mark.parametrize("style", STYLES)
def test_equals_a_plain_forward(style: str, chunk: int, tmp_path: Path) -> None:
    file = STYLES[style]()
    check(load(file.write(tmp_path)), file, chunk)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_of_other_types(dtype: torch.dtype, tmp_path: Path) -> None:
    """The same numbers, rounded when written: the forward of the rounded ones."""
    file = files.specforge()
    file.write(tmp_path, dtype)
    for name, tensor in file.tensors.items():
        if tensor.is_floating_point():
            file.tensors[name] = tensor.to(dtype).float()
    check(load(tmp_path), file, LENGTH)


def test_in_bfloat16(tmp_path: Path) -> None:
    file = files.specforge()
    check(load(file.write(tmp_path, torch.bfloat16), dtype=torch.bfloat16), file, LENGTH, tolerance=0.15)


def test_keys_and_values_of_one_byte(tmp_path: Path) -> None:
    file = files.specforge()
    head = load(file.write(tmp_path))
    aux, token_ids, _ = inputs_of(file)
    states = head.project(aux)
    kv = torch.zeros(head.kv_shape(10, BLOCK), dtype=torch.float8_e4m3fn)
    pieces = [head.run(states[a : a + 1], token_ids[a : a + 1], meta_of(a, a + 1), kv) for a in range(LENGTH)]
    exact = run(head, states, token_ids, LENGTH)
    error = float((torch.cat(pieces) - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.03


def test_several_files(tmp_path: Path) -> None:
    file = files.speculators()
    check(load(file.write(tmp_path, shards=3)), file, LENGTH)


def test_many_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up are made for some tokens at a time."""
    monkeypatch.setattr("chorale.model.draft.head.MLP_TOKENS", 5)
    file = files.specforge()
    check(load(file.write(tmp_path)), file, LENGTH)


def test_draft_ids_are_differences(tmp_path: Path) -> None:
    file = files.specforge()
    head = load(file.write(tmp_path))
    assert head.token_ids.tolist() == [i + int(d) for i, d in enumerate(file.tensors["d2t"])]
    assert load(files.full_vocabulary().write(tmp_path / "full")).token_ids.tolist() == list(
        range(files.VOCAB)
    )


def test_an_embedding_equal_to_the_targets_is_shared(tmp_path: Path) -> None:
    file = files.specforge()
    folder = file.write(tmp_path)
    assert load(folder).weights.embedding is not EMBEDDING
    same = file.tensors["embed_tokens.weight"].clone()
    assert load(folder, Target(target_config(), embedding=same)).weights.embedding is same


def test_a_cut_embedding_is_looked_up_by_the_target(tmp_path: Path) -> None:
    """Of several ranks: this one has half of the rows."""
    file = files.nvidia()
    target = Target(target_config(), embedding=EMBEDDING[:256], embed=lambda ids: EMBEDDING[ids])
    check(load(file.write(tmp_path), target), file, 7)
    assert load(files.specforge().write(tmp_path / "own"), target)._embed is None


def test_matrices_of_the_target(tmp_path: Path) -> None:
    """Neither an embedding nor an output matrix of its own: rows of the target's, from its files."""
    from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
    from chorale.model.weights import Target as WeightTarget
    from chorale.model.weights import load_weights

    config = target_config()
    folder = write_random_checkpoint(tmp_path / "target", config)
    weights = load_weights(folder, WeightTarget(config, REFERENCE_OPS, torch.float32))
    file = files.specforge()
    ids = file.tensors["d2t"] + torch.arange(files.DRAFT)
    del file.tensors["lm_head.weight"], file.tensors["embed_tokens.weight"]
    head = load(file.write(tmp_path / "head"), Target(config, folder))
    file.tensors["lm_head.weight"] = weights.head.weight[ids]
    file.tensors["embed_tokens.weight"] = weights.embedding.float()
    check(head, file, LENGTH)


def test_yarn() -> None:
    """A head's YaRN rounds the ends of its ramp, as Llama's does."""
    theta, factor, original, dim = 10000.0, 4.0, 64, 16
    rope = RopeConfig(theta=theta, factor=factor, original_max_position=original, truncate=True)
    table = head_rope_table(rope, dim, 20)

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(32.0)), 0), min(math.ceil(pair(1.0)), dim - 1)
    for i in range(dim // 2):
        frequency = theta ** (-2 * i / dim)
        slowed = min(max((i - low) / (high - low), 0.0), 1.0)
        frequency = frequency * (1 - slowed) + frequency / factor * slowed
        scale = 0.1 * math.log(factor) + 1
        assert abs(float(table[19, i]) - scale * math.cos(19 * frequency)) < 1e-5
        assert abs(float(table[19, dim // 2 + i]) - scale * math.sin(19 * frequency)) < 1e-5


def test_the_assumed_boundaries_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "chorale.model.draft.load"):
        load(files.specforge().write(tmp_path / "mine"))
    expected = "1, 2, 3 read as layers: assumed, because the first is 1; states after 2, 3, 4 blocks"
    assert f"draft head {tmp_path / 'mine'}: eagle_aux_hidden_state_layer_ids {expected}" in caplog.messages


def test_a_back_end_without_draft_heads() -> None:
    ops = replace(REFERENCE_OPS, name="plain", draft=None)
    with pytest.raises(ConfigError, match="ops 'plain' have no draft heads"):
        random_head(small_head(target_config()), ops)


def test_shapes_without_a_file() -> None:
    """Meta tensors run through a head: what kernels are compiled for before there are weights."""
    config = small_head(target_config(), norm_before_fc=True, norm_before_residual=True, norm_output=True)
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
