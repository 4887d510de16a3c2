"""``TritonSlots``: their memory, and what is written there."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from chorale.kernels.adapters import Adapter, LayerAdapter, LowRank, SlotSizes
from chorale.model.config_writer import SHAPES, make_config
from chorale.runtime.sizing.memory import slot_bytes

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from chorale.kernels.triton.lora.slots import OUTPUT, TritonSlots


def slots_of(sizes: SlotSizes, device: str = "cpu") -> TritonSlots:
    return TritonSlots(sizes, torch.device(device))


def small() -> SlotSizes:
    return SlotSizes(2, 8, torch.float32, 1, hidden=32, query=32, key=16, experts=4, inter=32, vocab=20)


@pytest.mark.parametrize("rank", [1, 16, 20])
def test_slots_take_the_memory_that_fit_counts(rank: int) -> None:
    model = make_config(**SHAPES["20b"])
    query, key = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    sizes = SlotSizes(
        3, rank, torch.bfloat16, model.num_hidden_layers, model.hidden_size, query, key,
        model.num_local_experts, model.intermediate_size, model.vocab_size,
    )  # fmt: skip
    pairs = slots_of(sizes, "meta").pairs.values()
    taken = sum(part.nbytes for each in pairs for part in (each.a, each.b, each.bias) if part is not None)
    assert taken == 3 * slot_bytes(model, rank, "bfloat16")


def test_the_next_adapter_of_a_slot_leaves_nothing_of_the_last() -> None:
    slots = slots_of(small())
    a, b = torch.ones(8, 32), torch.ones(32, 8)
    slots.write(1, Adapter((LayerAdapter(output=LowRank(a, b, torch.ones(32))),)))
    assert slots.ranks[0, :, 1].tolist() == [0, 0, 0, 8, 0, 0, 0, 0]
    slots.write(1, Adapter((LayerAdapter(output=LowRank(a[:2], 2 * b[:, :2])),)))
    assert slots.ranks[0, :, 1].tolist() == [0, 0, 0, 2, 0, 0, 0, 0]
    _, written, bias, ranks = slots.of_layer(OUTPUT, 0)
    assert bias is not None
    assert not bias[1].any()
    assert bool((written[1, :, :2] == 2).all())
    assert ranks.tolist() == [[0, 2]]


def test_the_next_adapter_of_a_slot_drops_its_head() -> None:
    slots = slots_of(small())
    slots.write(1, Adapter((LayerAdapter(),), torch.ones(20, 32)))
    assert list(slots.heads) == [1]
    slots.write(1, Adapter((LayerAdapter(),)))
    assert not slots.heads
