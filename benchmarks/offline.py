"""Measures Chorale or vLLM through its class ``LLM``, or a server over HTTP: README's table of speed.

    chorale bench make-checkpoint 20b FOLDER
    python -m benchmarks.offline chorale FOLDER [--json FILE]
    python -m benchmarks.offline vllm FOLDER [--options '{"moe_backend": "marlin"}'] [--json FILE]
    python -m benchmarks.offline http http://127.0.0.1:8000 [--json FILE]    # with Chorale's client
    python -m benchmarks.offline table FILE [FILE ...]                       # Markdown, a column per file

Run the first two in the environment of the engine; of the repository, only this file is needed. All engines
get the same random prompts and limits, sample with temperature 1, ignore stop tokens and keep no prefix
cache; start a server with ``SETTINGS`` as its flags. Over HTTP, prompts are token ids of /v1/completions with
``min_tokens`` and ``ignore_eos``, and answers are streams. Speed does not depend on the weights' values.

A case is ROWS:PROMPT:OUTPUT: requests submitted at once, and the tokens of each. Its first run compiles and
captures. Then each of ``--runs`` takes the seconds with one output token (``first``) and with all (``full``).
``prefill`` is prompt tokens over ``first``, ``decode`` is output tokens after the first over ``full`` minus
``first``, ``whole`` is output tokens over ``full``. It prints medians in tokens a second, and in brackets the
slowest and the fastest run. GPUs of one kind differ by several percent: compare engines on one machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.request import urlopen

CASES = ("1:128:512", "8:128:512", "64:1024:512", "256:1024:512", "1024:1024:1024", "8:8192:1")
SETTINGS: dict[str, Any] = {
    "max_model_len": 16_384, "max_num_seqs": 1024, "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.9, "enable_prefix_caching": False,
}  # fmt: skip
VLLM = {"skip_tokenizer_init": True, "disable_log_stats": True, "max_cudagraph_capture_size": 1024}
GPU = "name,driver_version,power.limit,clocks.max.sm,clocks.sm,clocks.mem,temperature.gpu"


@dataclass(frozen=True)
class Case:
    rows: int
    prompt: int
    output: int

    @classmethod
    def read(cls, text: str) -> Case:
        rows, prompt, output = map(int, text.split(":"))
        return cls(rows, prompt, output)

    def prompts(self) -> list[list[int]]:
        draw = random.Random(self.rows)
        return [draw.choices(range(1000, 190_000), k=self.prompt) for _ in range(self.rows)]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("engine", choices=["chorale", "vllm", "http", "table"])
    options.add_argument("model", nargs="+", help="folder of a checkpoint; URL of a server; files of results")
    options.add_argument("--cases", type=Case.read, nargs="+", default=[Case.read(case) for case in CASES])
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--options", type=json.loads, default={}, help="more arguments of LLM, as JSON")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    if given.engine == "table":
        print(table([json.loads(Path(file).read_text("utf-8")) for file in given.model]))
        return
    (model,) = given.model
    settings = SETTINGS | (VLLM if given.engine == "vllm" else {}) | given.options
    runner: Callable[[Case], Callable[[int], float]]
    began = time.perf_counter()
    if given.engine == "http":
        name, version = server(model)
        found: dict[str, Any] = machine(f"a server of version {version}, over HTTP")
        settings, runner = {}, lambda case: seconds_over_http(model, name, case)
    else:
        engine = importlib.import_module(given.engine)
        found = machine(f"{given.engine} {engine.__version__}")
        llm = engine.LLM(model=model, **settings)
        runner = partial(seconds_of, engine, llm)
    found |= {
        "model": model,
        "settings": settings,
        "start": f"{time.perf_counter() - began:.1f} s",
        "cases": [],
    }
    print(*(f"{name:8} {value}" for name, value in found.items() if value), sep="\n", flush=True)
    for case in given.cases:
        found["cases"].append(asdict(case) | measure(runner(case), case, given.runs))
        print(line(found["cases"][-1]), flush=True)
    found["end"] = device()
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"end      {found['end']}\nmemory   {found['memory'] / 1e9:.1f} GB, the peak of this process")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def machine(engine: str) -> dict[str, str]:
    # If a package is installed twice, Python imports the first one.
    found = reversed(list(distributions()))
    packages = {each.name: each.version for each in found if each.name in ("torch", "triton")}
    numbers = {"Python": platform.python_version()} | packages
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "engine": engine,
        "versions": ", ".join(f"{name} {number}" for name, number in numbers.items()),
        "device": device(),
    }


def server(url: str) -> tuple[str, str]:
    """Returns the first model of a server and the server's version."""
    with urlopen(f"{url}/v1/models") as models, urlopen(f"{url}/version") as version:
        return json.load(models)["data"][0]["id"], json.load(version)["version"]


def device() -> str:
    if shutil.which("nvidia-smi") is None:
        return f"no NVIDIA GPU; {platform.machine()}, {os.cpu_count()} CPUs"
    return subprocess.getoutput(f"nvidia-smi --query-gpu={GPU} --format=csv")


def seconds_of(engine: Any, llm: Any, case: Case) -> Callable[[int], float]:
    """Returns a function that runs the case with a number of output tokens and returns the seconds."""
    prompts = [{"prompt_token_ids": prompt} for prompt in case.prompts()]

    def seconds(output: int) -> float:
        lengths = {"max_tokens": output, "min_tokens": output}
        params = engine.SamplingParams(temperature=1.0, ignore_eos=True, detokenize=False, **lengths)
        began = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - began
        made = [len(result.outputs[0].token_ids) for result in results]
        if made != [output] * case.rows:
            raise RuntimeError(f"expected {case.rows} answers of {output} tokens, got {made}")
        return took

    return seconds


def seconds_over_http(url: str, model: str, case: Case) -> Callable[[int], float]:
    """Returns the same for a server: all requests of the case are sent at once."""
    from chorale.measure.bench.connection import Target
    from chorale.measure.bench.load import LoadRequest, Pace
    from chorale.measure.bench.load_processes import run_load

    target = Target(
        f"{url}/v1/completions", (("Authorization", f"Bearer {os.environ.get('OPENAI_API_KEY')}"),)
    )
    body = {"model": model, "temperature": 1.0, "ignore_eos": True, "stream": True}
    prompts = case.prompts()

    def seconds(output: int) -> float:
        lengths = {"max_tokens": output, "min_tokens": output, "stream_options": {"include_usage": True}}
        requests = [
            LoadRequest(json.dumps(body | lengths | {"prompt": prompt}), case.prompt) for prompt in prompts
        ]
        outcomes, took = run_load(target, Pace(), requests, -(-case.rows // 256), lambda _: None)
        made = [each.error or each.output_tokens for each in outcomes]
        if made != [output] * case.rows:
            raise RuntimeError(f"expected {case.rows} answers of {output} tokens, got {made}")
        return took

    return seconds


def measure(seconds: Callable[[int], float], case: Case, runs: int) -> dict[str, list[float]]:
    """Returns the tokens a second of each run."""
    seconds(case.output)
    found: dict[str, list[float]] = {"decode": [], "prefill": [], "whole": []}
    for _ in range(runs):
        first = seconds(1)
        full = seconds(case.output) if case.output > 1 else first
        found["prefill"].append(case.rows * case.prompt / first)
        found["whole"].append(case.rows * case.output / full)
        if case.output > 1:
            found["decode"].append(case.rows * (case.output - 1) / (full - first))
    return found


def line(found: dict[str, Any]) -> str:
    text = f"{found['rows']:5} rows, {found['prompt']}/{found['output']} tokens:"
    for name in ("decode", "prefill", "whole"):
        if rates := found[name]:
            text += f"  {name} {statistics.median(rates):,.1f} ({min(rates):,.1f} to {max(rates):,.1f})"
    return text


def table(results: Sequence[dict[str, Any]]) -> str:
    """Returns Markdown: a row per case and rate, a column per result, and below what was measured where."""
    cells: dict[str, dict[int, str]] = {}
    for number, result in enumerate(results):
        for case in result["cases"]:
            for name in ("decode", "prefill") if case["output"] > 1 else ("prefill",):
                row = f"{case['rows']:,}: {case['prompt']:,} / {case['output']:,} | {name}"
                cells.setdefault(row, {})[number] = f"{statistics.median(case[name]):,.0f}"
    lines = [
        "| rows: tokens in / out | tokens per second |" + "".join(f" {each['engine']} |" for each in results)
    ]
    lines.append("|---" * (2 + len(results)) + "|")
    for row, found in cells.items():
        lines.append(f"| {row} |" + "".join(f" {found.get(number, '')} |" for number in range(len(results))))
    keys = ("engine", "date", "versions", "model", "settings", "device", "end")
    notes = ["* " + "; ".join(f"{key}: {each[key]}" for key in keys if each[key]) for each in results]
    return "\n".join([*lines, "", *notes])


if __name__ == "__main__":
    main()
