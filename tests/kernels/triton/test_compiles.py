"""Every Triton kernel compiles for chips that are not here: ``compile_kernels.py``, in its own process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.kernels.triton.test_interpreter import ROOT, SECONDS, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


GPUS = ("h200", "a100", "b200", "mi300x", "mi355x", "r9700", "rtx-a4000", "rtx-4080", "rtx-5080", "dgx-spark")


def compile_for(tmp_path: Path, *arguments: str) -> None:
    settings = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(ROOT)}
    run(["-m", "tests.support.kernels.compile_kernels", *arguments], TRITON_INTERPRET="0", **settings)


@pytest.mark.timeout(SECONDS)
def test_one_form_of_each_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    compile_for(tmp_path, "h200", "each")


@pytest.mark.timeout(SECONDS)
def test_kernels_with_much_shared_memory_compile_for_consumer_gpus(tmp_path: Path) -> None:
    """Within the 99 KiB of a program, on the oldest of these GPUs."""
    kernels = ("prefill._prefill_kernel", "skinny._part_kernel", "host_rows._host_rows_kernel")
    compile_for(tmp_path, "rtx-a4000", *kernels)


@pytest.mark.timeout(SECONDS)
def test_a_step_allocates_what_is_planned_for_a_small_gpu() -> None:
    run(["-m", "tests.support.kernels.step_memory", "rtx-4080"], TRITON_INTERPRET="0", PYTHONPATH=str(ROOT))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("gpu", GPUS)
def test_every_kernel_of_a_server_compiles(gpu: str, tmp_path: Path) -> None:
    """Within the GPU's registers and shared memory. Only on the first one was any ever run."""
    compile_for(tmp_path, gpu)
