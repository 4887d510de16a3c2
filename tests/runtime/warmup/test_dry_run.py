"""The dry run finds every kernel that steps launch later. In a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support import ROOT

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("20b", marks=pytest.mark.slow),
        pytest.param("120b", marks=pytest.mark.slow),
        pytest.param("20b --meta", marks=pytest.mark.slow),
        "20b --ranks 2",
        pytest.param("20b --ranks 2 --by-expert", marks=pytest.mark.slow),
    ],
)
def test_no_kernel_is_compiled_while_serving(line: str) -> None:
    settings = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    settings["TRITON_DEFAULT_FP_FUSION"] = "1"
    command = [sys.executable, "-m", "tests.support.kernels.dry_run_steps", *line.split()]
    done = subprocess.run(command, env=settings, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(r"(\d+) kernels found, (\d+) not recorded", done.stdout)
    assert found is not None
    assert int(found[1]) > 60
    assert int(found[2]) == 0, done.stdout + done.stderr[-4000:]
