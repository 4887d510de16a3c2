"""Which of the expert products' forms so many tokens get: nothing falls between two of them."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chorale.kernels.ops import Routed

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def forms(monkeypatch: pytest.MonkeyPatch, num_experts: int, hopper: bool) -> dict[int, str]:
    """By number of tokens, each of which chooses four experts, at gpt-oss's sizes in bfloat16."""
    from chorale.kernels.triton.moe import gemv, grouped, moe

    monkeypatch.setattr(grouped, "is_hopper", lambda device: hopper)
    monkeypatch.setattr(gemv, "is_nvidia", lambda device: True)
    experts: Any = SimpleNamespace(
        num_experts=num_experts,
        total=num_experts,
        dtype=torch.bfloat16,
        intermediate=2880,
    )
    found = {}
    for tokens in (*range(1, 1100), 2048, 8192, 16384):
        normed, chosen = (torch.empty(tokens, width, device="meta") for width in (2880, 4))
        found[tokens] = moe.form_of(Routed(normed, chosen, chosen), experts, 2880)
    return found


@pytest.mark.parametrize(("num_experts", "last"), [(32, 24), (128, 96)])
def test_hopper_streams_and_then_multiplies_large_tiles(
    num_experts: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tokens, form in forms(monkeypatch, num_experts, hopper=True).items():
        assert form == ("streamed" if tokens <= last else "grouped"), tokens


def test_the_type_of_inputs_depends_on_the_batch_unless_bits_must_not() -> None:
    from chorale.kernels.triton.moe.grouped import uses_e4m3

    packed: Any = SimpleNamespace(total=32, down_largest=torch.zeros(1))
    few, many = 32 * 64, 32 * 64 + 1
    assert [uses_e4m3(packed, pairs, invariant=False) for pairs in (4, few, many)] == [False, False, True]
    assert [uses_e4m3(packed, pairs, invariant=True) for pairs in (4, few, many)] == [True, True, True]


@pytest.mark.parametrize(("num_experts", "last"), [(32, 96), (128, 256)])
def test_other_chips_of_nvidia_stream_and_then_take_plain_tiles(
    num_experts: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tokens, form in forms(monkeypatch, num_experts, hopper=False).items():
        assert form == ("streamed" if tokens <= last else "tiles"), tokens


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("pairs_each", [4, 8, 12, 16, 24, 32, 64, 128, 1024])
@pytest.mark.parametrize("num_experts", [8, 32, 128])
def test_large_tiles_make_every_column_and_fit_their_memory(
    num_experts: int, pairs_each: int, fp8: bool
) -> None:
    """Of 96 columns down reads 128; what nobody wrote could be NaN."""
    from chorale.kernels.triton import tuning
    from chorale.runtime.sizing.memory import LEFT_OUT

    tile = tuning.grouped(pairs_each, num_experts, fp8=fp8)
    assert tile.most_left_out <= LEFT_OUT
    each = 16 * tile.warps * tile.units
    for inter in (32, 96, 128, 352, 2880):
        columns = -(-inter // 64) * 64
        blocks = tile.row_blocks(columns, is_gate_up=True)
        assert (blocks - 1) * each < 2 * columns <= blocks * each
    assert tile.row_blocks(2880, is_gate_up=False) * each >= 2880
