"""OpenAI's evals for these models, unmodified, against ``chorale serve``: ``--eval basic``, both samplers.

``install.sh`` makes the environment (they ask for Python 3.12). They send ``max_output_tokens`` 131072, and
try again for ever when an answer is empty or refused: a fault of ours ends in the timeout.
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.served import Served, serving

PYTHON = os.environ.get("CHORALE_EVALS_PYTHON")
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="CHORALE_EVALS_PYTHON names no environment (install.sh)"
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("demo", tmp_path_factory.mktemp("evals")) as server:
        yield server


@pytest.mark.parametrize("sampler", ["responses", "chat_completions"])
def test_the_basic_eval(demo: Served, sampler: str, tmp_path: Path) -> None:
    options = ["--eval", "basic", "--model", "demo", "--sampler", sampler, "--base-url", f"{demo.url}/v1"]
    done = subprocess.run(
        [str(PYTHON), "-m", "gpt_oss.evals", *options],
        cwd=tmp_path, env={**os.environ, "OPENAI_API_KEY": "unused"}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Bad Request" not in done.stdout
    assert "retry" not in done.stdout
    scores = ast.literal_eval(done.stdout.splitlines()[-1])
    assert [score["model_name"].split("_")[0] for score in scores] == ["demo-low", "demo-medium", "demo-high"]
    assert [score["metric"] for score in scores] == [1.0, 1.0, 1.0]
