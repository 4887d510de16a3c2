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
    twins = str(HERE / "twins.py")
    run(["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", twins], TRITON_INTERPRET="1")


@pytest.mark.parametrize("target", ["cuda:90"])
def test_every_kernel_compiles(target: str, tmp_path: Path) -> None:
    script = str(HERE / "compile_kernels.py")
    run([script, target], TRITON_CACHE_DIR=str(tmp_path), TRITON_DEFAULT_FP_FUSION="1", PYTHONPATH=str(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:80", "cuda:100", "hip:gfx942", "hip:gfx950"])
def test_every_kernel_compiles_for_hardware_that_was_never_tried(target: str, tmp_path: Path) -> None:
    test_every_kernel_compiles(target, tmp_path)
