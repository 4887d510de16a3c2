"""The all-reduce between GPUs: every form against the reference, equal bits, graphs, and ranks that are
missing or killed (``benchmarks/all_reduce.py --check``, a process a GPU). ``pytest -m gpu``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.support import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host"),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_agree_and_a_missing_one_is_named(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "benchmarks/all_reduce.py", "--ranks", str(ranks), "--check"]
    done = subprocess.run(command, env=settings, cwd=ROOT, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stdout.count("named after") == 2
