"""``vllm bench serve``, unmodified, against ``chorale serve``: it reports the same counts as the server.

``install.sh`` makes the environment: the Python files of vLLM's wheel, without its kernels. The client needs
a tokenizer that transformers can read, so the vocabulary is first written in that format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.clients.hf_tokenizer import write_tokenizer
from tests.acceptance.clients.program import Program
from tests.support.served import Served

PROGRAM = Program("CHORALE_VLLM_PYTHON")
pytestmark = PROGRAM.skip
REQUESTS, INPUT, OUTPUT = 8, 64, 24
ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def bench(server: Served, tokenizer: Path, backend: str, folder: Path, *options: str) -> dict[str, Any]:
    command = f"vllm.entrypoints.cli.main bench serve --backend {backend} --base-url {server.url}"
    command += (
        f" --endpoint {ENDPOINTS[backend]} --model demo --dataset-name random --ignore-eos --save-result"
    )
    command += f" --random-input-len {INPUT} --random-output-len {OUTPUT} --num-prompts {REQUESTS}"
    command += " --num-warmups 1 --max-concurrency 4"
    folders = ("--tokenizer", str(tokenizer), "--result-dir", str(folder))
    done = PROGRAM.run(*command.split(), *folders, *options, folder=folder)
    assert "Serving Benchmark Result" in done.stdout
    [result] = folder.glob("*.json")
    return dict(json.loads(result.read_text()))


@pytest.mark.parametrize("backend", list(ENDPOINTS))
def test_its_counts_are_correct(demo_served: Served, tokenizer: Path, backend: str, tmp_path: Path) -> None:
    names = ("vllm:generation_tokens_total", "vllm:request_success_total")
    before = [demo_served.metric(name) for name in names]
    options = ("--temperature", "0.5", "--top-k", "20", "--repetition-penalty", "1.1", "--profile")
    found = bench(demo_served, tokenizer, backend, tmp_path, *options)
    assert (found["completed"], found["failed"]) == (REQUESTS, 0)
    assert found["total_output_tokens"] == REQUESTS * OUTPUT
    if backend != "openai-chat":  # a chat's prompt also contains the tokens of the conversation's format
        assert found["total_input_tokens"] == REQUESTS * INPUT
    assert 0 < found["mean_ttft_ms"] < found["duration"] * 1000
    asked = REQUESTS + 1  # the warm-up
    tokens, requests = (demo_served.metric(name) - count for name, count in zip(names, before, strict=True))
    assert (tokens, requests) == (asked * OUTPUT, asked)
