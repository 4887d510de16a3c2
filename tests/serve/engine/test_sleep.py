"""Engines that release their memory and restore it, on a CPU: the same answers, of one rank and of two."""

from __future__ import annotations

import gzip
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from chorale.config.read_objects import read_profiler
from chorale.config.speculative import SpeculativeConfig
from chorale.errors import ConfigError
from chorale.kernels.triton.dense.host_rows import pack_host_rows
from chorale.machine.hardware import Hardware
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from chorale.runtime.device import CpuDevice
from chorale.runtime.rank_memory import PIECE, SavedStorages, storages_of
from tests.parallel.test_ranks import WIDE
from tests.serve.engine.test_weight_update import tell
from tests.support.runtime import example_answers, make_engine, running, tokens_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("wide"), make_config(**WIDE), seed=3)


@pytest.mark.parametrize(
    ("size", "drafts"), [(1, False), (2, True)], ids=["plain", "ranks with a draft head"]
)
def test_answers_after_waking_have_the_same_bits(folder: Path, size: int, drafts: bool) -> None:
    method = SpeculativeConfig(method="synthetic", num_speculative_tokens=3) if drafts else None
    options: dict[str, Any] = {"tensor_parallel_size": size, "speculative_config": method}
    options["prompt_delay"] = 0.0  # otherwise the chunks of prompts depend on the time that steps take
    with running(folder, enable_sleep_mode=True, **options) as core:
        before = example_answers(core)
        for level in (1, 2):
            tell(core, "sleep", level=level)
            for tag in ("weights", "kv_cache"):
                tell(core, "wake_up", tags=(tag,))
            found = example_answers(core)
            if drafts:  # which drafts a step verifies depends on time, and the last bits on the step's size
                assert tokens_of(found) == tokens_of(before)
            else:
                assert found == before


def test_a_sleep_drops_the_memory(folder: Path) -> None:
    core = make_engine(folder, enable_sleep_mode=True)
    worker = core._executor._worker  # type: ignore[attr-defined]
    pool, embedding = weakref.ref(worker._kv[0]), weakref.ref(worker._model.weights.embedding)
    del worker
    tell(core, "sleep", level=1)
    assert (pool() is None, embedding() is None) == (True, False)
    tell(core, "sleep", level=2)
    assert embedding() is None
    tell(core, "wake_up")
    embedding = weakref.ref(core._executor._worker._model.weights.embedding)  # type: ignore[attr-defined]
    core.shutdown()
    assert embedding() is None


def test_storages_move_to_host_memory_and_views_stay_valid() -> None:
    device = CpuDevice(Hardware("cpu", "CPU", 1, 1))
    whole = torch.arange(PIECE // 4 + 1001, dtype=torch.int32)
    view, other = whole[1:].view(-1, 4), torch.ones(3, dtype=torch.bfloat16)
    kept = whole.clone()
    storages = storages_of([{"a": (whole, view)}, other], device.torch_device)
    assert len(storages) == 2
    saved = SavedStorages(storages, device)
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    saved.restore(device)
    assert torch.equal(whole, kept)
    assert torch.equal(view, kept[1:].view(-1, 4))
    assert other.tolist() == [1, 1, 1]


def test_rows_in_host_memory_stay_where_the_device_reads_them() -> None:
    """The table of their addresses moves like other weights; it stays true, because the rows do not move."""
    device = torch.device("meta")
    rows = pack_host_rows(torch.ones(5, 8), device)
    [moved] = storages_of([rows], device)
    assert moved.nbytes() == rows.addresses.nbytes
    assert all(piece.device.type == "cpu" for piece in rows.pieces)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_rank_writes_a_trace(folder: Path, tmp_path: Path, size: int) -> None:
    given = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_with_stack": False}
    config = read_profiler(given, "--profiler-config")
    with running(folder, tensor_parallel_size=size, profiler_config=config) as core:
        tell(core, "start_profile")
        example_answers(core)
        tell(core, "stop_profile")
    traces = sorted(tmp_path.iterdir(), key=lambda path: path.name[-20:])
    assert len(traces) == size
    for trace in traces:
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


@pytest.mark.parametrize(
    "given",
    [
        [],
        {"profiler": "torch"},
        {"profiler": "torch", "torch_profiler_dir": "relative"},
        {"profiler": "cuda", "torch_profiler_dir": "/tmp"},
        {"profiler": "torch", "torch_profiler_dir": "/dev/null/x"},
        {"profiler": "torch", "torch_profiler_dir": "/tmp", "torch_profiler_with_stack": "yes"},
        {"profiler": "torch", "torch_profiler_dir": "/tmp", "delay_iterations": 5},
    ],
)
def test_profiler_settings_that_cannot_work_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError):
        read_profiler(given, "--profiler-config")
    assert not Path("relative").exists()
