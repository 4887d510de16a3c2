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


@pytest.mark.parametrize("twins", ["twins.py", "twins_large.py", "twins_e4m3.py"])
def test_every_op_equals_its_twin(twins: str) -> None:
    run(["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(HERE / twins)], TRITON_INTERPRET="1")
