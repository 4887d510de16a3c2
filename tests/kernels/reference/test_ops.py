"""Each reference op against its definition, written as loops over tokens, heads and experts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from chorale.errors import ConfigError
from chorale.kernels import mxfp4, select_ops
from chorale.kernels.cpu.library import library
from chorale.kernels.ops import ExpertTensors, Routed
from chorale.kernels.reference import moe as reference_moe
from chorale.kernels.reference import ops as reference


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


def expert_tensors(
    experts: int, dense: bool, dtype: torch.dtype
) -> tuple[ExpertTensors, torch.Tensor, torch.Tensor]:
    """(tensors, W1 [E, 2 I, H], W2 [E, H, I]) with H = 64 and I = 32."""
    up = mxfp4.quantize(randn(experts, 64, 64, seed=1))
    down = mxfp4.quantize(randn(experts, 64, 32, seed=2))
    w1, w2 = mxfp4.dequantize(*up, torch.float32), mxfp4.dequantize(*down, torch.float32)
    given: dict[str, Any] = {
        "gate_up_blocks": up[0],
        "gate_up_scales": up[1],
        "down_blocks": down[0],
        "down_scales": down[1],
    }
    if dense:
        given = {"gate_up": w1.transpose(1, 2), "down": w2.transpose(1, 2)}
    tensors = ExpertTensors(
        gate_up_bias=randn(experts, 64, seed=3),
        down_bias=randn(experts, 64, seed=4),
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        num_layers=1,
        dtype=dtype,
        **given,
    )
    return tensors, w1, w2


@pytest.mark.parametrize("form", ["dense", "decoded", "packed"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 4, 4), (5, 32, 4), (33, 8, 4), (40, 5, 1)])
def test_moe(monkeypatch: pytest.MonkeyPatch, form: str, tokens: int, experts: int, top_k: int) -> None:
    """Some experts get nothing, one gets most; inputs large enough that the clamps bite."""
    monkeypatch.setattr(reference_moe, "DECODED_BUDGET", 0 if form == "packed" else 2**30)
    monkeypatch.setattr(mxfp4, "ROWS_AT_ONCE", 24)  # ragged chunks
    tensors, w1, w2 = expert_tensors(experts, form == "dense", torch.float32)
    packed = reference_moe.pack_experts(tensors)
    assert isinstance(packed, reference_moe.PackedExperts) == (form == "packed")
    normed, x = 3 * randn(tokens, 64, seed=5), randn(tokens, 64, seed=6)
    popular = torch.arange(experts) == 1
    ids = torch.stack(
        [torch.topk(randn(experts, seed=20 + t) + 2 * popular, top_k).indices for t in range(tokens)]
    )
    gates = torch.softmax(randn(tokens, top_k, seed=9), -1)
    expected, clamped = x.double().clone(), 0
    for token in range(tokens):
        for gate, expert in zip(gates[token], ids[token].tolist(), strict=True):
            inner = w1[expert].double() @ normed[token].double() + tensors.gate_up_bias[expert].double()
            values = []
            for g, u in inner.view(-1, 2).tolist():
                clamped += g > 7 or abs(u) > 7
                g, u = min(g, 7.0), max(-7.0, min(u, 7.0))
                values.append(g / (1 + math.exp(-1.702 * g)) * (u + 1))
            result = w2[expert].double() @ torch.tensor(values, dtype=torch.float64)
            expected[token] += float(gate) * (result + tensors.down_bias[expert].double())
    assert clamped > 10
    actual = reference_moe.moe(Routed(normed, ids, gates), packed, x)
    # sums of 64 products of order 50: float32 keeps six digits of the largest
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-3)


def test_experts_need_all_their_tensors() -> None:
    tensors, _, _ = expert_tensors(2, False, torch.float32)
    fields = {name: getattr(tensors, name) for name in tensors.__slots__}
    with pytest.raises(ValueError, match="all four MXFP4"):
        reference_moe.pack_experts(ExpertTensors(**{**fields, "down_scales": None}))


def test_lm_head_norms_only_what_is_asked() -> None:
    x, norm, weight = randn(9, 12), randn(12, seed=1), randn(50, 12, seed=2)
    logits = reference.lm_head(x, torch.tensor([8, 0]), norm, reference.pack_head(weight), 1e-5)
    for row, token in enumerate((8, 0)):
        normed = x[token] / (x[token].pow(2).mean() + 1e-5).sqrt() * norm
        torch.testing.assert_close(logits[row], weight @ normed)
