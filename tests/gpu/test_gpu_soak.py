"""A busy life on a GPU: no error, no block lost, memory flat. ``pytest -m gpu``."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.support.device.soak import soak
from tests.support.runtime import make_engine

pytestmark = pytest.mark.gpu


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("depth", [0, 1])
def test_memory_stays_flat(checkpoint: Path, depth: int) -> None:
    options = {"num_gpu_blocks_override": 100, "max_model_len": 256, "max_num_batched_tokens": 256}
    core = make_engine(checkpoint, device="cuda", ops="triton", async_scheduling=bool(depth), **options)
    while core.use_idle_time():  # every graph is there, so that none is made on the way
        pass
    soak(core, 40, seed=0, memory=allocated)
    before = allocated()
    marks = soak(core, 400, seed=1, memory=allocated)
    assert core.stats().num_preemptions > 0
    rows = 8 * 4 * 2**20  # what rows in flight may hold: histories and counts
    assert max(marks) - before < rows
    assert allocated() - before < rows // 8
