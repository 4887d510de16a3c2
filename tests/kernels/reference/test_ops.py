"""Each reference op against its definition, written as loops over tokens, heads and experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorale.errors import ConfigError
from chorale.kernels import mxfp4, select_ops
from chorale.kernels.cpu.library import library
from chorale.kernels.ops import Routed
from chorale.kernels.reference import moe as reference_moe
from chorale.kernels.reference import ops as reference
from tests.kernels.experts import decoded, expected_sum, make_experts

PACKED = ("gate_up_blocks", "gate_up_scales", "down_blocks", "down_scales")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ choosing


def test_select_ops() -> None:
    assert select_ops("auto", "cpu").name == ("reference" if library().functions is None else "cpu")
    assert select_ops("reference", "cpu").name == "reference"
    assert select_ops("reference", "cuda").name == "reference"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_forced_back_end_that_cannot_run_is_an_error(device: str) -> None:
    with pytest.raises(ConfigError, match="triton"):
        select_ops("triton", device)
    with pytest.raises(ConfigError, match="cutlass"):
        select_ops("cutlass", device)


# ------------------------------------------------------------------ experts


@pytest.mark.parametrize("form", ["dense", "decoded", "packed"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 4, 4), (5, 32, 4), (33, 8, 4), (40, 5, 1)])
def test_moe(monkeypatch: pytest.MonkeyPatch, form: str, tokens: int, experts: int, top_k: int) -> None:
    """Some experts get nothing, one gets most; inputs large enough that the clamps bite."""
    monkeypatch.setattr(reference_moe, "DECODED_BUDGET", 0 if form == "packed" else 2**30)
    monkeypatch.setattr(mxfp4, "ROWS_AT_ONCE", 24)  # ragged chunks
    tensors = replace(make_experts(experts, 64, 32), swiglu_limit=1.5)
    normed, x = 3 * randn(tokens, 64, seed=5), randn(tokens, 64, seed=6)
    popular = torch.arange(experts) == 1
    ids = torch.stack(
        [torch.topk(randn(experts, seed=20 + t) + 2 * popular, top_k).indices for t in range(tokens)]
    )
    gates = torch.softmax(randn(tokens, top_k, seed=9), -1)
    expected = expected_sum(tensors, normed, ids, gates)
    unlimited = expected_sum(replace(tensors, swiglu_limit=1e9), normed, ids, gates)
    assert not torch.allclose(unlimited, expected, atol=0.1)
    if form == "dense":
        gate_up, down = (each.transpose(1, 2) for each in decoded(tensors))
        tensors = replace(tensors, **dict.fromkeys(PACKED), gate_up=gate_up, down=down)
    packed = reference_moe.pack_experts(tensors)
    assert isinstance(packed, reference_moe.PackedExperts) == (form == "packed")
    actual = reference_moe.moe(Routed(normed, ids, gates), packed, x.clone())
    torch.testing.assert_close(actual.double(), expected + x, rtol=1e-5, atol=2e-5)


def test_experts_need_all_their_tensors() -> None:
    with pytest.raises(ValueError, match="all four MXFP4"):
        reference_moe.pack_experts(replace(make_experts(2, 64, 32), down_scales=None))


def test_lm_head_norms_only_what_is_asked() -> None:
    x, norm, weight = randn(9, 12), randn(12, seed=1), randn(50, 12, seed=2)
    logits = reference.lm_head(x, torch.tensor([8, 0]), norm, reference.pack_head(weight), 1e-5)
    for row, token in enumerate((8, 0)):
        normed = x[token] / (x[token].pow(2).mean() + 1e-5).sqrt() * norm
        torch.testing.assert_close(logits[row], weight @ normed)
