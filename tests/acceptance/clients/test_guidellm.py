"""guidellm, unmodified, against ``chorale serve``: prompts from a file and synthetic ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.clients.hf_tokenizer import write_tokenizer
from tests.acceptance.clients.program import Program
from tests.support.served import Served

PROGRAM = Program("CHORALE_GUIDELLM_PYTHON")
pytestmark = PROGRAM.skip
REQUESTS, INPUT, OUTPUT = 6, 40, 24


def run(server: Served, folder: Path, endpoint: str, data: str, *more: str) -> dict[str, Any]:
    """Returns the benchmark of the report."""
    out = folder / "report.json"
    command = ["guidellm", "run", "--disable-console-interactive", "--data", data, *more]
    command += ["--backend", f"kind=openai_http,target={server.url},request_format={endpoint},model=demo"]
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--output", f"kind=json,path={out}"]
    PROGRAM.run(*command, folder=folder)
    [benchmark] = json.loads(out.read_text())["benchmarks"]
    return dict(benchmark)


def completed(benchmark: dict[str, Any]) -> list[dict[str, Any]]:
    requests = benchmark["requests"]
    assert requests["errored"] == []
    assert len(requests["successful"]) >= REQUESTS - 1  # it stops counting when the last one ends
    return list(requests["successful"])


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_prompts_of_a_file(demo_served: Served, tmp_path: Path, endpoint: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"What is {i} + 2?", "output_tokens_count": OUTPUT} for i in range(10)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for request in completed(run(demo_served, tmp_path, endpoint, f"kind=json_file,path={prompts}")):
        assert request["output_tokens"] == OUTPUT


def test_synthetic_prompts(demo_served: Served, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    data = f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"
    more = ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    for request in completed(run(demo_served, tmp_path, "/v1/completions", data, *more)):
        assert request["output_tokens"] == OUTPUT
        assert abs(request["prompt_tokens"] - INPUT) <= 2
