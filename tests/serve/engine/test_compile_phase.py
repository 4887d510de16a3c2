"""The compile phase records steps, so that their kernels are compiled before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chorale.config.engine import EngineConfig
from chorale.kernels.reference.ops import REFERENCE_OPS
from chorale.machine.hardware import Hardware
from chorale.model.config import ModelConfig
from chorale.runtime.device import CpuDevice
from chorale.runtime.sampling.grammar import GrammarCache
from chorale.runtime.sizing.resolve import resolve
from chorale.runtime.warmup.captures import preparations
from chorale.serve.engine import compile_phase
from chorale.serve.engine.build_rank import load_model, weight_target

DEVICE = CpuDevice(Hardware("cpu", "stand-in", 2**34, 2**34), can_capture=True, overlap=True)


class Steps:
    """A precompiler for which each step has one kernel."""

    num_kernels = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        yield
        self.num_kernels += 1


@pytest.mark.parametrize("eager", [False, True])
def test_a_start_waits_for_the_kernels_of_its_graphs(checkpoint: Path, eager: bool) -> None:
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    config = EngineConfig(model=str(checkpoint), enforce_eager=eager, **sizes)
    model_config, steps = ModelConfig.load(checkpoint), Steps()
    found = resolve(config, model_config, DEVICE.hardware, can_capture=True)
    model = load_model(checkpoint, weight_target(config, model_config, REFERENCE_OPS, found, DEVICE), found)
    precompiler: Any = steps
    needed = compile_phase.DryModel(model, found, DEVICE, GrammarCache(model_config.vocab_size)).record(
        precompiler
    )
    at_once = [is_first for _, is_first in preparations(found.graph_rows, found.limits).values()]
    assert needed == (steps.num_kernels if eager else sum(at_once))
    assert steps.num_kernels > len(at_once) > 0
