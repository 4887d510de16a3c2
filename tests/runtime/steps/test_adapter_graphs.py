"""Captured steps with adapters, on a device that runs the contents of its graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from chorale.engine.core import EngineCore
from chorale.kernels.adapters import NONE, Adapter, AdapterBatch, SlotSizes
from chorale.kernels.reference.ops import REFERENCE_OPS
from tests.runtime.steps.test_decode_graphs import decodes_of, graph_engine, mixed_of
from tests.runtime.test_adapters import FORMS, adapter_request
from tests.runtime.test_adapters import folder as folder
from tests.support.runtime import each_alone, make_engine, run, tokens_of


class HostSlots:
    """``AdapterSlots`` for the reference's ops, which need each adapter's tokens."""

    def __init__(self, sizes: SlotSizes, device: torch.device) -> None:
        self._adapters: dict[int, Adapter] = {}

    def check(self, adapter: Adapter) -> None: ...

    def write(self, slot: int, adapter: Adapter) -> None:
        self._adapters[slot] = adapter

    def batch(self, slots: torch.Tensor, reach: int) -> AdapterBatch:
        numbers = sorted(set(slots.tolist()) - {-1})
        assert max((self._adapters[slot].reach for slot in numbers), default=NONE) <= reach
        groups = ((self._adapters[slot], (slots == slot).nonzero().squeeze(1)) for slot in numbers)
        return AdapterBatch(slots.long(), tuple(groups))


def adapter_engine(folder: Path) -> EngineCore:
    assert REFERENCE_OPS.lora is not None
    ops = replace(REFERENCE_OPS, lora=replace(REFERENCE_OPS.lora, make_slots=HostSlots))
    return graph_engine(folder, ops, enable_lora=True, max_loras=2, max_cpu_loras=4)


def test_captured_steps_with_adapters_give_the_tokens_of_launched_ones(folder: Path) -> None:
    """More adapters than slots, so that slots and rows are used by one after the other."""
    core = adapter_engine(folder / "model")
    launched = make_engine(folder / "model", enable_lora=True, max_loras=2, max_cpu_loras=4, ops="reference")
    work = [
        adapter_request(f"{form}-{turn}", folder, form, temperature=turn, seed=7, length=30 + 10 * turn)
        for turn in (0, 1)
        for form in ("", *FORMS)
    ]
    assert tokens_of(run(core, work)) == each_alone(launched, work)
    for graphs in (decodes_of(core)._graphs, mixed_of(core)._graphs):
        assert any(key[-1] != NONE for key in graphs)


def test_steps_without_an_adapter_have_their_own_graphs(folder: Path) -> None:
    core = adapter_engine(folder / "model")
    run(core, [adapter_request("base", folder, "")])
    assert {key[-1] for key in decodes_of(core)._graphs} == {NONE}
