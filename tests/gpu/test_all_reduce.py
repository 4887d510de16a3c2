"""The all-reduce between GPUs: every form against the reference, equal bits, graphs, and ranks that are
missing or killed (``benchmarks.gpu.all_reduce --check``, a process a GPU); and sampling over GPUs
(``benchmarks.gpu.shared_sampling``). ``pytest -m gpu``."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host"),
]


RANKS = pytest.mark.parametrize("ranks", [2, 4, 8])


def run(benchmark: str, ranks: int, *options: str) -> str:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    command = [sys.executable, "-m", f"benchmarks.gpu.{benchmark}", "--ranks", str(ranks), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.timeout(400)
@RANKS
def test_ranks_agree_and_a_missing_one_is_named(ranks: int) -> None:
    assert run("all_reduce", ranks, "--check").count("named after") == 2


@pytest.mark.timeout(400)
@RANKS
def test_ranks_sample_what_one_rank_samples(ranks: int) -> None:
    """Rows with filters and without, launched and in graphs, exchanged in kernels and by NCCL."""
    assert "replayed with other logits: one rank's tokens" in run("shared_sampling", ranks)
