"""GPU errors while an engine loads and steps, on a CPU device that is labelled as a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.errors import GpuError
from chorale.runtime.device import CpuDevice
from chorale.runtime.worker import Worker
from chorale.serve.engine import build_rank
from tests.support.runtime import make_engine, random_prompt, request

LABEL = "GPU 2 (NVIDIA H200, GPU-1a2b, 00000000:1b:00.0)"
ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.fixture
def folder(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a checkpoint. Engines run on a CPU device that is labelled as a GPU."""
    opened = build_rank.open_device

    def open_device(*arguments: Any, **options: Any) -> CpuDevice:
        device = opened(*arguments, **options)
        assert isinstance(device, CpuDevice)
        return replace(device, hardware=replace(device.hardware, label=LABEL))

    monkeypatch.setattr(build_rank, "open_device", open_device)
    return checkpoint


def fail(*_: object, **__: object) -> None:
    raise torch.AcceleratorError(ECC)


def test_a_gpu_error_while_loading_names_the_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_rank, "load_weights", fail)
    with pytest.raises(GpuError, match=r"the engine could not be loaded: GPU 2 \(NVIDIA H200, GPU-1a2b"):
        make_engine(folder)


@pytest.mark.parametrize("run", [fail, lambda *_: fail], ids=["launched", "fetched"])
def test_a_gpu_error_in_a_step_names_the_gpu(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_engine(folder)
    monkeypatch.setattr(Worker, "run", run)
    core.add_request(request("a", random_prompt(10), max_tokens=4))
    with pytest.raises(GpuError, match=r"step \d+ failed: GPU 2 \(NVIDIA H200, GPU-1a2b"):
        core.step()
    core.shutdown()
