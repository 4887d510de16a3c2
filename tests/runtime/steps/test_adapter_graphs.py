"""Captured steps with adapters, on a device that runs the contents of its graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chorale.config.engine import EngineConfig
from chorale.engine.core import EngineCore
from chorale.kernels.adapters import NONE, Adapter, AdapterBatch, SlotSizes
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.model.config import ModelConfig
from chorale.runtime.build_executor import allocate_kv, make_executor
from chorale.runtime.sampling.grammar import GrammarCache, GrammarRows
from chorale.runtime.sizing.resolve import resolve
from chorale.serve.engine.build_rank import adapter_store, load_model
from tests.runtime.steps.test_decode_graphs import DEVICE, decodes_of, mixed_of
from tests.runtime.test_adapters import FORMS, adapter_request, write_model_and_adapters
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_adapters(tmp_path_factory.mktemp("lora"))


def graph_engine(folder: Path) -> EngineCore:
    config = EngineConfig(
        model=str(folder), max_model_len=1024, max_num_seqs=8, num_gpu_blocks_override=1024, block_size=16,
        enable_lora=True, max_loras=2, max_cpu_loras=4,
    )  # fmt: skip
    assert REFERENCE_OPS.lora is not None
    ops = replace(REFERENCE_OPS, lora=replace(REFERENCE_OPS.lora, make_slots=HostSlots))
    model_config = ModelConfig.load(folder)
    found = resolve(config, model_config, DEVICE.hardware, can_overlap=True, can_capture=True)
    model = load_model(folder, model_config, ops, found, DEVICE, lambda *_: None)
    adapters = adapter_store(config, model_config, ops, found, DEVICE)
    grammars = GrammarCache(model_config.vocab_size)
    executor = make_executor(
        model, allocate_kv(model_config, found, DEVICE), found, DEVICE, GrammarRows(DEVICE, grammars),
        adapters=adapters,
    )  # fmt: skip
    return EngineCore(found.limits, executor, grammars=grammars, adapters=adapters)


def test_captured_steps_with_adapters_give_the_tokens_of_launched_ones(folder: Path) -> None:
    """More adapters than slots, so that slots and rows are used by one after the other."""
    core = graph_engine(folder / "model")
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
    core = graph_engine(folder / "model")
    run(core, [adapter_request("base", folder, "")])
    assert {key[-1] for key in decodes_of(core)._graphs} == {NONE}
