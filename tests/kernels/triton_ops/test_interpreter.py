"""The Triton kernels on a CPU: ``twins.py`` through Triton's interpreter, in a process of its own.

(Triton decides when it is imported whether kernels are interpreted, for the whole process.)
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def run(command: list[str], **environment: str) -> None:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(
        [sys.executable, *command], env=settings, cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def test_every_op_equals_its_twin() -> None:
    twins = [str(HERE / name) for name in ("twins.py", "twins_large.py", "twins_e4m3.py")]
    run(["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *twins], TRITON_INTERPRET="1")


def compile_for(tmp_path: Path, *arguments: str) -> None:
    settings = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(ROOT)}
    run([str(HERE / "compile_kernels.py"), *arguments], TRITON_INTERPRET="0", **settings)


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    compile_for(tmp_path, "cuda:90")


def test_the_large_kernels_compile_for_hardware_that_was_never_tried(tmp_path: Path) -> None:
    """All of them do (without names: a minute); these have the products and the inline assembly."""
    targets = ("cuda:80", "cuda:100", "hip:gfx942", "hip:gfx950")
    pages = ("rotate fp8", "decode 0 fp8", "prefill 128 fp8")
    compile_for(tmp_path, *targets, "gate_up 64", "down 1", "stream down 64", *pages)
