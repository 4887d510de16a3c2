"""examples/grpo.py against a server of its own, whose weights it changes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.served import serving

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "grpo.py"


@pytest.mark.slow  # transformers takes ten seconds to import and load
def test_two_updates(tmp_path: Path) -> None:
    """The script itself fails if rollouts come from other weights than it expects."""
    folder, chart = tmp_path / "weights", tmp_path / "chart.svg"
    options = ("--weight-transfer-config", f'{{"backend": "checkpoint", "allowed_folders": ["{folder}"]}}')
    with serving("demo", tmp_path, "--logprobs-mode", "processed_logprobs", *options) as server:
        sizes = ("--updates", "2", "--questions", "2", "--samples", "3")
        done = subprocess.run(
            [sys.executable, SCRIPT, "--folder", folder, "--chart", chart, *sizes],
            env={**os.environ, "CHORALE_URL": server.url, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert server.ask("/weight_info") == (200, {"weight_version": "2"})
    worst = re.search(r"mean [\d.e-]+, worst ([\d.e-]+)\n$", done.stdout)
    assert worst is not None, done.stdout
    # Both compute in float32, in another order: 4.6e-5 was the worst of 725 tokens.
    assert float(worst[1]) < 1e-3
    assert len(ElementTree.parse(chart).findall("{*}circle")) == 2
