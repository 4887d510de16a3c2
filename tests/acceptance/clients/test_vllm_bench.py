"""``vllm bench serve``, unmodified, against ``chorale serve``: the counts that it reports are the server's.

``install.sh`` makes the environment: the Python files of vLLM's wheel, without its kernels. The client wants
the tokenizer as transformers reads it, so the vocabulary is written out in that form first.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.clients.hf_tokenizer import write_tokenizer
from tests.support.served import Served, serving

PYTHON = os.environ.get("CHORALE_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="CHORALE_VLLM_PYTHON names no environment (install.sh)"
)
REQUESTS, INPUT, OUTPUT = 8, 64, 24
ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("demo", tmp_path_factory.mktemp("bench")) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def bench(server: Served, tokenizer: Path, backend: str, folder: Path, *options: str) -> dict[str, Any]:
    command = [str(PYTHON), "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend]
    command += ["--base-url", server.url, "--endpoint", ENDPOINTS[backend], "--model", "demo"]
    command += [
        "--tokenizer",
        str(tokenizer),
        "--dataset-name",
        "random",
        "--ignore-eos",
        "--num-warmups",
        "1",
    ]
    command += [
        "--random-input-len",
        str(INPUT),
        "--random-output-len",
        str(OUTPUT),
        "--max-concurrency",
        "4",
    ]
    command += ["--num-prompts", str(REQUESTS), "--save-result", "--result-dir", str(folder), *options]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Serving Benchmark Result" in done.stdout
    [result] = folder.glob("*.json")
    return dict(json.loads(result.read_text()))


@pytest.mark.parametrize("backend", list(ENDPOINTS))
def test_its_counts_are_ours(demo: Served, tokenizer: Path, backend: str, tmp_path: Path) -> None:
    names = ("vllm:generation_tokens_total", "vllm:request_success_total")
    before = [demo.metric(name) for name in names]
    options = ("--temperature", "0.5", "--top-k", "20", "--repetition-penalty", "1.1", "--profile")
    found = bench(demo, tokenizer, backend, tmp_path, *options)
    assert (found["completed"], found["failed"]) == (REQUESTS, 0)
    assert found["total_output_tokens"] == REQUESTS * OUTPUT
    if backend != "openai-chat":  # a chat's prompt has the frame of the conversation around it
        assert found["total_input_tokens"] == REQUESTS * INPUT
    assert 0 < found["mean_ttft_ms"] < found["duration"] * 1000
    asked = REQUESTS + 1  # the warm-up
    tokens, requests = (demo.metric(name) - count for name, count in zip(names, before, strict=True))
    assert (tokens, requests) == (asked * OUTPUT, asked)
