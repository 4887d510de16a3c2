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

from tests.support import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
SECONDS = 1500  # so that a busy machine cannot fail what is no measurement
HERE = Path(__file__).parent


def run(command: list[str], **environment: str) -> None:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(
        [sys.executable, *command], env=settings, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def interpret(*twins: str, every: int = 1) -> None:
    """Of each test's cases, every n-th."""
    files = [str(HERE / name) for name in twins]
    command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-o", f"timeout={SECONDS}", *files]
    run(command, TRITON_INTERPRET="1", CHORALE_TWINS_EVERY=str(every))


TWINS = (
    *("twins.py", "twins_large.py", "twins_e4m3.py", "twins_experts.py", "twins_draft.py"),
    *("dense/twins_compact.py", "dense/twins_invariant.py", "lora/twins_lora.py", "reduce/twins_ranks.py"),
)
STEP_TWINS = ("step_twins.py", "filter_twins.py", "draft_twins.py", "page_twins.py")


@pytest.mark.timeout(SECONDS)
def test_every_op_equals_its_twin_in_some_cases() -> None:
    """Those around the model too: one process for all of them."""
    interpret(*TWINS, *STEP_TWINS, every=48)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("twins", TWINS)
def test_every_op_equals_its_twin(twins: str) -> None:
    interpret(twins)
