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
def test_one_form_of_each_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    compile_for(tmp_path, "cuda:90", "each")


@pytest.mark.timeout(SECONDS)
def test_some_kernels_compile_for_hardware_that_was_never_tried(tmp_path: Path) -> None:
    """One of each maker, with products, and inline assembly for the first; the others are marked slow."""
    compile_for(tmp_path, "cuda:80", "hip:gfx942", "gate_up 64", "skinny")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_more_kernels_compile_for_hardware_that_was_never_tried(tmp_path: Path) -> None:
    targets = ("cuda:80", "hip:gfx942", "hip:gfx1201")
    compile_for(tmp_path, *targets, "gate_up 64", "skinny", "decode 0", "route 32 bf16")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    compile_for(tmp_path, "cuda:90")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_large_kernels_compile_for_hardware_that_was_never_tried(tmp_path: Path) -> None:
    """All of them do (without names: a minute); these have the products, the inline assembly, and shapes of a
    architecture's own table."""
    targets = ("cuda:80", "cuda:100")
    some = (
        "rank of some",
        "gate_up 1 of some",
        "sum of some",
        "stream up 2 of some",
        "reduce 2 of some",
        "scatter 4",
    )
    tables = ("skinny", "skinny head", "prefill 0", "decode 0")
    blocks = ("rotate fp8", "decode 0 fp8", "prefill 128 fp8")
    compile_for(tmp_path, *targets, "gate_up 64", "down 1", "stream down 64", *some, *tables, *blocks)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("architecture", ["gfx942", "gfx950", "gfx1201"])
def test_every_kernel_compiles_for_amd(architecture: str, tmp_path: Path) -> None:
    """In all variants that an AMD GPU can launch, within its registers; none was ever run there."""
    compile_for(tmp_path, f"hip:{architecture}")
