"""DFlash and P-EAGLE heads, loaded from files and run by ``HeadRunner``, against a plain forward of what was
written. As in ``draft_files.py``, the forward is written from the descriptions and shares no code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.errors import ConfigError
from chorale.kernels.draft_steps import DraftRowState
from chorale.kernels.ops import AttentionMeta, SamplingInputs
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.model.draft.config import published_head
from chorale.runtime.drafts.head_runner import HeadRunner, ReadTokens
from chorale.runtime.sizing.memory import head_kv_bytes
from tests.model.draft import draft_files as files
from tests.model.draft.draft_files import DIM, HIDDEN, KV_HEADS, LLAMA, VOCAB, HeadFile, randn, rms, run_layer
from tests.model.draft.test_refused import complaint
from tests.model.draft.test_styles import EMBEDDING, load, target_config

LAYERS, BLOCK, MASK, MOST, WIDTH = 3, 8, 7, 6, 6


def layer_tensors(width: int, number: int, *, normed: bool) -> files.Tensors:
    """A layer whose products of q, k and v have inputs of ``width``. ``normed``: its heads have norms."""
    made = files.tensors_of("", seed=10 + number)
    found = {name: made[name] for name in made if "_proj" in name or "layernorm" in name}
    for name in "qkv":
        found[f"self_attn.{name}_proj.weight"] = found[f"self_attn.{name}_proj.weight"][:, :width]
    for name in "qk" if normed else "":
        found[f"self_attn.{name}_norm.weight"] = 1 + 0.2 * randn(DIM, seed=20 + number)
    return {f"layers.{number}.{name}": tensor for name, tensor in found.items()}


def dflash(**changes: Any) -> HeadFile:
    """As the authors publish them, and an output matrix, which is the target's by default."""
    tensors = {name: 1 + 0.2 * randn(HIDDEN, seed=1) for name in ("norm.weight", "hidden_norm.weight")}
    tensors["fc.weight"] = randn(HIDDEN, 3 * HIDDEN, seed=3) / 14
    tensors["lm_head.weight"] = randn(VOCAB, HIDDEN, seed=4) / 8
    for number in range(LAYERS):
        tensors |= layer_tensors(HIDDEN, number, normed=True)
    config = {
        **LLAMA,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "layer_types": ["full_attention"] * LAYERS,
        "block_size": 8,
        "num_target_layers": 4,
        "tie_word_embeddings": True,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1, 3]},
    }  # without rope_theta
    return HeadFile(config | changes, tensors, angles=lambda length: files.angles_of(length, 1e6))


def peagle(**changes: Any) -> HeadFile:
    tensors = files.tensors_of("layers.0.", seed=6, mapped=False)
    for number in range(1, LAYERS):
        tensors |= layer_tensors(HIDDEN, number, normed=False)
        tensors[f"layers.{number}.hidden_norm.weight"] = torch.zeros(HIDDEN)  # never used
    tensors["mask_hidden"] = 2 * randn(1, 1, 3 * HIDDEN, seed=8)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **LLAMA,
        "num_hidden_layers": LAYERS,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
        "ptd_token_id": MASK,
    }
    return HeadFile(config | changes, tensors)


# ------------------------------------------------------------------ the forward, from its description


def logits_of(file: HeadFile, x: torch.Tensor) -> torch.Tensor:
    return rms(x, file.tensors["norm.weight"], file.eps) @ file.tensors["lm_head.weight"].t()


def plain_dflash(file: HeadFile, aux: torch.Tensor, following: torch.Tensor, count: int) -> torch.Tensor:
    """Logits [count, V] of a draft after ``following``, the tokens after each of the states."""
    context = rms(aux @ file.tensors["fc.weight"].t(), file.tensors["hidden_norm.weight"], file.eps)
    x = EMBEDDING[[int(following[-1]), *[MASK] * count]]
    for number in range(LAYERS):
        normed = rms(x, file.tensors[f"layers.{number}.input_layernorm.weight"], file.eps)
        x = run_layer(file, f"layers.{number}.", x, normed, torch.cat((context, normed)), 0.0)
    return logits_of(file, x[1:])


def plain_peagle(file: HeadFile, aux: torch.Tensor, following: torch.Tensor, count: int) -> torch.Tensor:
    tensors = file.tensors
    states = torch.cat((aux, tensors["mask_hidden"][0].expand(count - 1, -1))) @ tensors["fc.weight"].t()
    tokens = torch.cat((following, following.new_full((count - 1,), MASK)))
    x = tensors["embed_tokens.weight"][tokens]
    embedded = rms(x, tensors["layers.0.input_layernorm.weight"], file.eps)
    normed = torch.cat((embedded, rms(states, tensors["layers.0.hidden_norm.weight"], file.eps)), dim=1)
    x, future = states, torch.full((len(states), len(states)), -math.inf).triu(1)
    for number in range(LAYERS):
        if number:
            normed = rms(x, tensors[f"layers.{number}.input_layernorm.weight"], file.eps)
        x = run_layer(file, f"layers.{number}.", x, normed, normed, future)
    return logits_of(file, x[-count:])


TABLES = torch.stack((torch.arange(1, 1 + WIDTH), torch.arange(20, 20 - WIDTH, -1))).int()
STALE = 3  # rejected tokens after a row's last kept one


def meta_of(spans: list[tuple[int, int]]) -> AttentionMeta:
    """Positions ``first`` to ``end`` - 1 of each row."""
    positions = [torch.arange(first, end) for first, end in spans]
    slots = torch.cat(
        [TABLES[row][at // BLOCK] * BLOCK + at % BLOCK for row, at in enumerate(positions)]
    ).long()
    counts = torch.tensor([0] + [len(at) for at in positions])
    return AttentionMeta(
        torch.cat(positions), counts.cumsum(0).int(), torch.tensor([end for _, end in spans]).int(),
        (TABLES, TABLES), (slots, slots), int(counts.max()), 64,
    )  # fmt: skip


def state_of(lengths: list[int]) -> DraftRowState:
    """Rows 1 and 2 of three, after ``lengths`` tokens and a sample; row 0 is not used."""
    zeros = torch.zeros(3, dtype=torch.int64)
    return DraftRowState(
        zeros, torch.tensor([0, *lengths]), torch.zeros(MOST, 3, dtype=torch.int64), zeros, zeros,
        torch.full((3, 4), -1, dtype=torch.int32), torch.zeros(3, 4),
        torch.cat((torch.zeros_like(TABLES[:1]), TABLES)).expand(2, -1, -1).contiguous(), BLOCK, 1, 0,
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, MOST])
@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize(("file", "plain"), [(dflash(), plain_dflash), (peagle(), plain_peagle)])
def test_drafts_of_rows_at_different_positions(
    file: HeadFile, plain: Callable[..., torch.Tensor], split: int, count: int, tmp_path: Path
) -> None:
    """Both rows are read in two steps, the second with rejected tokens at the end."""
    lengths = [9, 22]
    head = load(file.write(tmp_path))
    states = [2 * randn(length + STALE, 3 * HIDDEN, seed=length) for length in lengths]
    tokens = [torch.arange(length + STALE) * 31 % VOCAB for length in lengths]
    drawn: list[torch.Tensor] = []

    def draw(logits: torch.Tensor, draws: SamplingInputs, drafts: torch.Tensor, out: torch.Tensor) -> None:
        drawn.append(logits)
        drafts[draws.rows.long()] = out[:] = logits.argmax(1)

    state = state_of(lengths)
    kv = torch.zeros(head.kv_shape(24, BLOCK))
    runner = HeadRunner(head, REFERENCE_OPS, kv, state, draw, max_len=64, dtype=torch.float32)
    rows = torch.tensor([1, 2], dtype=torch.int32)
    before, after = [(0, n - split) for n in lengths], [(n - split, n + STALE) for n in lengths]
    for step, spans in enumerate((before, after)):
        ends = torch.tensor([last - first for first, last in spans]).cumsum(0)
        inputs = (
            torch.cat([of_row[first:last] for of_row, (first, last) in zip(each, spans, strict=True)])
            for each in (states, tokens)
        )
        read = ReadTokens(*inputs, meta_of(spans), ends - 1 - (STALE if step else 0), rows)
        runner.run(read, count if step else 0)
    found = torch.cat(drawn).view(count, 2, VOCAB)
    for row, length in enumerate(lengths):
        expected = plain(file, states[row][:length], tokens[row][:length], count)
        torch.testing.assert_close(found[:, row], expected, rtol=1e-4, atol=1e-4)
        assert state.drafts[:count, row + 1].tolist() == expected.argmax(1).tolist()
    assert not state.drafts[:, 0].any()


@pytest.mark.parametrize(("layers", "read"), [(24, (2, 7, 12, 17, 22)), (36, (2, 10, 18, 26, 34))])
def test_the_published_layers(layers: int, read: tuple[int, ...]) -> None:
    """After layers 1, 6, 11, 16, 21 of 20b and 1, 9, 17, 25, 33 of 120b. Each layer has keys and values."""
    head = published_head(replace(target_config(), num_hidden_layers=layers), "dflash")
    assert head.aux_boundaries == read
    assert head_kv_bytes(head, 64, "bfloat16") == 8 * 64 * 2 * KV_HEADS * DIM * 2


REFUSED: dict[str, tuple[HeadFile, str]] = {
    "past the end": (dflash(dflash_config={"mask_token_id": 7, "target_layer_ids": [4]}), "from 0 to 3"),
    "another target": (dflash(num_target_layers=36), "num_target_layers"),
    "no mask": (dflash(dflash_config={"target_layer_ids": [0, 1, 3]}), "mask_token_id"),
    "a mask outside": (peagle(ptd_token_id=VOCAB), "ptd_token_id"),
    "vocabulary": (dflash(vocab_size=VOCAB + 1), "vocab_size"),
    "causal": (dflash(is_causal=True), "is_causal"),
    "a window": (dflash(layer_types=["sliding_attention"] * LAYERS), "layer_types"),
    "an anchor": (dflash(sample_from_anchor=True), "sample_from_anchor"),
    "more layers": (dflash(num_hidden_layers=4, layer_types=None), "layers.3"),
    "fewer layers": (peagle(num_hidden_layers=2), "layers.2"),
    "many layers": (peagle(num_hidden_layers=1000), "num_hidden_layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    file, key = REFUSED[case]
    assert key in complaint(file, tmp_path)


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.k_norm.weight"])
def test_missing_tensors(name: str, tmp_path: Path) -> None:
    file, other = dflash(), peagle()
    del file.tensors[name], other.tensors["mask_hidden"]
    assert f"{name}: missing" in complaint(file, tmp_path)
    assert "mask_hidden: missing" in complaint(other, tmp_path / "other")


def test_a_separate_embedding_of_the_mask_is_refused(tmp_path: Path) -> None:
    dflash().write(tmp_path)
    (tmp_path / "mask_embedding.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match=r"mask_embedding\.pt: a pickle"):
        load(tmp_path)
