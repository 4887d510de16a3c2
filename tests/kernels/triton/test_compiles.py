"""Every Triton kernel compiles for chips that are not here: ``compile_kernels.py``, in a process for each."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kernels.triton.test_interpreter import SECONDS
from tests.support import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


GPUS = ("h200", "a100", "b200", "mi300x", "mi355x", "r9700", "rtx-a4000", "rtx-4080", "rtx-5080", "dgx-spark")
Run = Callable[..., None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs ``main`` of a script of tests/support/kernels."""
    settings = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "TRITON_INTERPRET": "0"}
    settings |= {"TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command, pipe = [sys.executable, "-m", "tests.support.kernels.forks"], subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=os.environ | settings
    ) as process:

        def ask(script: str, *arguments: Any) -> None:
            print(json.dumps([f"tests.support.kernels.{script}", arguments]), file=process.stdin, flush=True)
            status, printed = json.loads(process.stdout.readline())
            assert status == 0, printed[-6000:]

        yield ask
        process.stdin.close()


@pytest.mark.timeout(SECONDS)
def test_one_form_of_each_kernel_compiles_for_hopper(run: Run) -> None:
    run("compile_kernels", "h200", ["each"], False)


@pytest.mark.timeout(SECONDS)
def test_kernels_with_much_shared_memory_compile_for_consumer_gpus(run: Run) -> None:
    """Within the 99 KiB of a program, on the oldest of these GPUs."""
    kernels = ["prefill._prefill_kernel", "skinny._part_kernel", "host_rows._host_rows_kernel"]
    run("compile_kernels", "rtx-a4000", kernels, False)


@pytest.mark.timeout(SECONDS)
def test_a_step_allocates_what_is_planned_for_a_small_gpu(run: Run) -> None:
    run("step_memory", "rtx-4080")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("gpu", GPUS)
def test_every_kernel_of_a_server_compiles(gpu: str, run: Run) -> None:
    """Within the GPU's registers and shared memory. Only on the first one was any ever run."""
    run("compile_kernels", gpu, [], False)
