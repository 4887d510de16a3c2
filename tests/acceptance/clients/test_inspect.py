"""Inspect, unmodified, against ``chorale serve``: its providers over both APIs, with and without a tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.clients.program import Program
from tests.support.served import Served

PROGRAM = Program("CHORALE_INSPECT_PYTHON")
pytestmark = PROGRAM.skip
SUMS = [(3, 4), (12, 5), (20, 22)]
TASKS = '''
from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import match
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def weather():
    async def execute(city: str) -> str:
        """Returns the weather.

        Args:
            city: name of the city
        """
        return "rain"

    return execute


def sums_of(*solvers):
    return Task(dataset=json_dataset("sums.jsonl"), solver=[*solvers, generate()], scorer=match(numeric=True))


@task
def sums():
    return sums_of()


@task
def sums_with_tool():
    return sums_of(use_tools(weather()))
'''


def run(server: Served, folder: Path, model: str, *more: str) -> list[dict[str, Any]]:
    """Returns the logs of both tasks."""
    (folder / "sums.py").write_text(TASKS)
    rows = [{"input": f"What is {a} + {b}?", "target": str(a + b)} for a, b in SUMS]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["inspect_ai", "eval", "sums.py", "--model", model, "--display", "none"]
    command += ["--log-format", "json", "--log-dir", "logs", "--temperature", "0", "--max-tokens", "256"]
    url = f"{server.url}/v1"
    keys = {f"{name}_API_KEY": "unused" for name in ("OPENAI", "CHORALE", "VLLM")}
    urls = {f"{name}_BASE_URL": url for name in ("OPENAI", "CHORALE", "VLLM")}
    PROGRAM.run(*command, *more, folder=folder, **keys, **urls)
    return [json.loads(path.read_text()) for path in (folder / "logs").glob("*.json")]


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("openai/demo", ["--reasoning-effort", "low"]),
        ("openai/demo", ["-M", "responses_api=true", "--reasoning-effort", "high"]),
        ("openai-api/chorale/demo", ["--logprobs", "--top-logprobs", "2", "--seed", "3", "--epochs", "2"]),
        ("vllm/demo", []),
    ],
    ids=["chat", "responses", "compatible", "vllm"],
)
def test_sums(demo_served: Served, tmp_path: Path, model: str, more: list[str]) -> None:
    logs = run(demo_served, tmp_path, model, *more)
    assert len(logs) == 2
    for log in logs:
        assert log["status"] == "success", log.get("error")
        [score] = log["results"]["scores"]
        assert score["metrics"]["accuracy"]["value"] == 1.0
        [usage] = log["stats"]["model_usage"].values()
        assert usage["reasoning_tokens"] > 0
        for sample in log["samples"]:
            [choice] = sample["output"]["choices"]
            assert choice["stop_reason"] == "stop"
            kinds = [part["type"] for part in choice["message"]["content"]]
            assert kinds == ["reasoning", "text"]
            if "--logprobs" in more:
                assert choice["logprobs"]["content"]
