"""Ranks with different memory: all size their pools by the least."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from chorale.config.engine import EngineConfig
from chorale.machine.hardware import Hardware
from chorale.model.config_writer import make_config
from chorale.runtime.device import CpuDevice
from chorale.runtime.sizing.resolve import Resolved, resolve
from chorale.serve.engine import build_rank
from chorale.serve.engine.build import build_engine
from chorale.serve.engine.ranks import common_memory
from tests.parallel.test_shared_model import ODD
from tests.support.runtime import random_prompt, request, run

MIB = 2**20
RICH, POOR = 2048 * MIB, 512 * MIB


# A rank whose device says that it has this much memory.
UNEVEN_RANK = """
import dataclasses, sys
from chorale.serve.engine import build_rank, rank_process

def open_device(*arguments, **options):
    device = opened(*arguments, **options)
    hardware = dataclasses.replace(device.hardware, total_bytes={free}, free_bytes={free}, uuid="GPU-1")
    return dataclasses.replace(device, hardware=hardware)

opened, build_rank.open_device = build_rank.open_device, open_device
sys.exit(rank_process.main())
"""
CONFIG = EngineConfig(
    tensor_parallel_size=2, num_threads=1, max_model_len=4096, max_num_seqs=1024, max_num_batched_tokens=64
)


def memory_is(free: int, of_rank_1: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = build_rank.open_device

    def open_device(*arguments: object, **options: object) -> CpuDevice:
        device = opened(*arguments, **options)  # type: ignore[arg-type]
        assert isinstance(device, CpuDevice)
        hardware = replace(device.hardware, total_bytes=free, free_bytes=free, uuid="GPU-0")
        return replace(device, hardware=hardware)

    monkeypatch.setattr(build_rank, "open_device", open_device)
    command = (sys.executable, "-c", UNEVEN_RANK.format(free=of_rank_1))
    monkeypatch.setattr("chorale.serve.engine.ranks.RANK_COMMAND", command)


def resolved_with(free: int) -> Resolved:
    return resolve(CONFIG, make_config(**ODD), Hardware("cpu", "stand-in", free, free))


@pytest.mark.parametrize(
    ("first", "second", "poorest"), [(RICH, POOR, 1), pytest.param(POOR, RICH, 0, marks=pytest.mark.slow)]
)
def test_all_ranks_size_their_pools_by_the_least_free_memory(
    odd: Path, first: int, second: int, poorest: int, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    memory_is(first, second, monkeypatch)
    core, info = build_engine(replace(CONFIG, model=str(odd)))
    try:
        poor, rich = resolved_with(POOR), resolved_with(RICH)
        assert info.num_blocks == poor.limits.num_blocks < rich.limits.num_blocks
        assert info.rank_free_bytes == (first, second)
        tokens, most = (each.geometry.tokens_in(each.limits.num_blocks) for each in (poor, rich))
        note = (
            f"rank {poorest} has 0.50 GiB free and the others at least 2.00 GiB: every rank's KV cache holds "
            f"what that one can, {tokens:,} tokens instead of {most:,}"
        )
        assert note in info.notes
        assert note in caplog.text
        answers = run(core, [request("a", random_prompt(30), max_tokens=12, temperature=0.0)])
        assert len(answers["a"][0].token_ids) == 12
    finally:
        core.shutdown()


NVIDIA_SMI = """#!/bin/sh
case "$1" in
  --query-gpu=index,uuid) echo "0, GPU-0"; echo "1, GPU-other"; echo "2, GPU-1" ;;
  topo) printf "\\tGPU0\\tGPU1\\tGPU2\\n"
    printf "GPU0\\t X \\tSYS\\tNV4\\nGPU1\\tSYS\\t X \\tPHB\\nGPU2\\tNV4\\tPHB\\t X \\n" ;;
esac
"""


def test_ranks_with_equal_memory_have_no_note(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their GPUs' links are those that nvidia-smi shows between these two, not those to others."""
    memory_is(RICH, RICH - MIB, monkeypatch)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    core, info = build_engine(replace(CONFIG, model=str(odd)))
    core.shutdown()
    assert not [note for note in info.notes if "rank" in note]
    assert info.exchange == "gloo"
    assert info.rank_links == "NVLink (NV4)"
    weights, pages = info.rank_bytes["weights"], info.rank_bytes["kv_cache"]
    assert weights[0] > weights[1] > 0  # 9 chunks of columns: 5 and 4
    assert pages[0] == pages[1] > 0


def test_the_memory_of_all_ranks_is_the_least_of_any_gpu() -> None:
    gpus = [
        Hardware("cuda", "H200", 140, free, label=f"GPU {number}", uuid=f"GPU-{number}")
        for number, free in enumerate((100, 60, 110))
    ]
    found = common_memory(gpus)
    assert (found.hardware.free_bytes, found.hardware.label, found.hardware.uuid) == (60, "GPU 1", "GPU-1")
    assert found.free_of_ranks == (100, 60, 110)
