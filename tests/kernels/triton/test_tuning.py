"""Which table a device gets, and what its own number of multiprocessors changes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def tuning_of() -> Iterator[Callable[[torch.device], Any]]:
    from chorale.kernels.triton import launch

    launch.tuning_of.cache_clear()
    yield launch.tuning_of
    launch.tuning_of.cache_clear()


@pytest.mark.parametrize(
    ("properties", "hip", "table", "programs"),
    [
        ({"major": 9, "minor": 0, "multi_processor_count": 132}, None, "sm_90", 264),
        ({"major": 9, "minor": 0, "multi_processor_count": 114}, None, "sm_90", 228),
        ({"major": 8, "minor": 0, "multi_processor_count": 108}, None, "sm_80", 216),
        ({"major": 8, "minor": 9, "multi_processor_count": 142}, None, "sm_89", 284),
        ({"major": 8, "minor": 6, "multi_processor_count": 48}, None, "sm_86", 96),
        ({"major": 8, "minor": 7, "multi_processor_count": 16}, None, "sm_86", 32),
        ({"major": 12, "minor": 1, "multi_processor_count": 48}, None, "sm_121", 96),
        ({"major": 10, "minor": 0, "multi_processor_count": 148}, None, "sm_100", 296),
        ({"major": 10, "minor": 3, "multi_processor_count": 148}, None, "sm_100", 296),
        ({"major": 12, "minor": 0, "multi_processor_count": 170}, None, "sm_120", 340),
        ({"gcnArchName": "gfx942:sramecc+:xnack-", "multi_processor_count": 304}, "7.0", "gfx942", 608),
        ({"gcnArchName": "gfx950:sramecc+", "multi_processor_count": 256}, "7.0", "gfx950", 512),
        ({"gcnArchName": "gfx90a:sramecc+", "multi_processor_count": 104}, "7.0", "gfx942", 208),
        ({"gcnArchName": "gfx1201", "multi_processor_count": 32}, "7.0", "gfx1201", 64),
        ({"gcnArchName": "gfx1100", "multi_processor_count": 48}, "7.0", "gfx1201", 96),
    ],
)
def test_a_device_gets_its_table(
    properties: dict[str, object],
    hip: str | None,
    table: str,
    programs: int,
    tuning_of: Callable[[torch.device], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from chorale.kernels.triton import tuning

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    found = tuning_of(torch.device("cuda"))
    assert found == replace(tuning.ARCH_TUNINGS[table], multiprocessors=programs // 2)
    assert found.programs == programs


def test_without_a_gpu_shapes_are_an_h200s(tuning_of: Callable[[torch.device], Any]) -> None:
    from chorale.kernels.triton import tuning

    assert tuning_of(torch.device("cpu")) is tuning.H200


def test_more_multiprocessors_take_more_parts() -> None:
    from chorale.kernels.triton.tuning import ARCH_TUNINGS

    h200, large = ARCH_TUNINGS["sm_90"], ARCH_TUNINGS["gfx942"]
    # Rows x kv heads x parts: 264 programs fill the one, 608 the other.
    assert h200.context_splits(1, 8, 131072, is_e4m3=False) == 64
    assert [chip.context_splits(8, 8, 131072, is_e4m3=False) for chip in (h200, large)] == [8, 16]
    assert (h200.skinny_splits(80, 23), large.skinny_splits(80, 23)) == (3, 6)
    assert (h200.route_slices(64), large.route_slices(64)) == (4, 9)
    assert h200.route_slices(513) == 1
    assert h200.context_splits(1, 8, 100, is_e4m3=False) == 2  # no more than tiles of keys, as a power of two
    # Small tiles, and so four times as many programs.
    assert [h200.context_splits(rows, 8, 1280, is_e4m3=True) for rows in (8, 64, 256)] == [32, 4, 1]


@pytest.mark.parametrize(("architecture", "size"), [("gfx942", 64), ("gfx950", 64), ("gfx1201", 32)])
def test_waves(architecture: str, size: int) -> None:
    from triton.backends.compiler import GPUTarget

    from chorale.kernels.triton.precompile.target import TargetDriver

    assert TargetDriver(architecture, 1).get_current_target() == GPUTarget("hip", architecture, size)


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950", "gfx1201"])
def test_no_path_of_nvidia_is_taken_on_an_amd_gpu(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither PTX, nor dependent launches, nor Hopper's matrix instructions, nor our all-reduce."""
    from chorale.kernels import select_ops
    from chorale.kernels.ops import StepSizes
    from chorale.kernels.triton import launch, shared_ops
    from chorale.model.config_writer import SHAPES, make_config
    from chorale.parallel.communicator import Silent
    from chorale.parallel.rank import Rank
    from chorale.parallel.shares import make_shares

    caches = (launch.is_amd, launch.is_nvidia, launch.capability_of, launch.tuning_of)
    properties = SimpleNamespace(gcnArchName=f"{architecture}:xnack-", multi_processor_count=64)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for cache in caches:
        cache.cache_clear()
    try:
        device = torch.device("cuda", 0)
        assert launch.is_amd(device)
        assert not launch.is_nvidia(device)
        assert not launch.is_hopper(device)
        assert launch.dependent(SimpleNamespace(device=device)) == {"PDL": False}  # type: ignore[arg-type]
        assert select_ops("auto", "cuda:0").name == "triton"
        assert select_ops("auto", "cuda:0", dense_experts=True).name == "reference"
        properties.gcnArchName = "gfx1036"  # a processor's own graphics: no table
        assert select_ops("auto", "cuda:0").name == "reference"
        rank = Rank(make_shares(make_config(**SHAPES["20b"]), 2, by_expert=False)[0], Silent(0, 2))
        assert shared_ops.over_peers(rank, StepSizes(2880, 64, torch.bfloat16), device) is None
    finally:
        for cache in caches:
            cache.cache_clear()


def test_ops_pack_compact_rows_only_if_they_can() -> None:
    from chorale.kernels.ops import with_compact
    from chorale.kernels.reference.ops import REFERENCE_OPS

    assert with_compact(REFERENCE_OPS) is REFERENCE_OPS
    ops = with_compact(replace(REFERENCE_OPS, pack_compact=lambda packed: (packed, "compact")))
    assert ops.pack_linear(torch.ones(2, 2), None)[1] == "compact"
    assert ops.pack_head(torch.ones(2, 2))[1] == "compact"
