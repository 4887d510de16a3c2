"""OpenAI's evals for these models, unmodified, against ``chorale serve``: ``--eval basic``, both samplers.

``install.sh`` makes the environment (the evals need Python 3.12). They send ``max_output_tokens`` 131072, and
retry for ever when an answer is empty or refused: a fault of the server ends in the timeout.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.acceptance.clients.program import Program
from tests.support.served import Served

PROGRAM = Program("CHORALE_EVALS_PYTHON")
pytestmark = PROGRAM.skip


@pytest.mark.parametrize("sampler", ["responses", "chat_completions"])
def test_the_basic_eval(demo_served: Served, sampler: str, tmp_path: Path) -> None:
    options = f"--eval basic --model demo --sampler {sampler} --base-url {demo_served.url}/v1"
    done = PROGRAM.run("gpt_oss.evals", *options.split(), folder=tmp_path)
    assert "Bad Request" not in done.stdout
    assert "retry" not in done.stdout
    scores = ast.literal_eval(done.stdout.splitlines()[-1])
    assert [score["model_name"].split("_")[0] for score in scores] == ["demo-low", "demo-medium", "demo-high"]
    assert [score["metric"] for score in scores] == [1.0, 1.0, 1.0]
