"""Every Triton kernel compiles for chips that are not here: ``compile_kernels.py``, in its own process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.kernels.triton.test_interpreter import ROOT, SECONDS, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def compile_for(tmp_path: Path, *arguments: str) -> None:
    settings = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(ROOT)}
    run(["-m", "tests.support.kernels.compile_kernels", *arguments], TRITON_INTERPRET="0", **settings)


@pytest.mark.timeout(SECONDS)
def test_one_form_of_each_kernel_compiles_for_hopper_and_two_for_amd(tmp_path: Path) -> None:
    compile_for(tmp_path, "cuda:90", "each", "hip:gfx942", "gate_up 64", "skinny")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    compile_for(tmp_path, "cuda:90")


LARGE = (
    *(
        "gate_up 64",
        "down 1",
        "stream down 64, 45 chunks",
        "stream up 2 of some",
        "rank of some",
        "gate_up 1 of some",
    ),
    *("sum of some", "reduce 2 of some", "scatter 4", "route 32 bf16"),
    *("skinny", "skinny head", "prefill 0", "decode 0", "rotate fp8", "decode 0 fp8", "prefill 128 fp8"),
)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("target", ["cuda:80", "cuda:100"])
def test_the_large_kernels_compile_for_other_nvidia_gpus(target: str, tmp_path: Path) -> None:
    """All of them do (without names: a minute); these have the products, the inline assembly, and shapes of
    an architecture's own table."""
    compile_for(tmp_path, target, *LARGE)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("architecture", ["gfx942", "gfx950", "gfx1201"])
def test_every_kernel_compiles_for_amd(architecture: str, tmp_path: Path) -> None:
    """In all variants that an AMD GPU can launch, within its registers; none was ever run there."""
    compile_for(tmp_path, f"hip:{architecture}")
