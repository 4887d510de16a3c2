"""One GPU against several: ranks through ``LLM.generate``, and engines behind one HTTP port.

    python benchmarks/several_gpus.py MODEL [--ranks 1 2 4] [--engines 1 4] [--json FILE] [--device cpu]

ranks    for each number, an ``LLM`` in a process of its own, with prefix caching off. Token ids in and out,
         temperature 1, the stop ids of the model ignored. After a warm-up of each case, the median of
         ``--runs``: tokens after each request's first, over the time of the full run minus that of a run
         which ends with the first token. Cases with one output token: prompt tokens over the fastest run.
engines  for each number, ``chorale serve --data-parallel-size`` and ``chorale bench serve``: ``--streams``
         concurrent random prompts of ``--lengths`` (tokens in, tokens out), two for each stream. Output
         tokens a second of the second run; the first compiles.

In brackets: against the first number of the list, which runs in the same call.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CASES = ("1:128:512", "8:128:512", "64:1024:512", "256:1024:512", "8:8192:1")
WORDS = 199_000  # ordinary tokens
PATIENCE = 600.0  # seconds, for the start of a server


@dataclass(frozen=True, slots=True)
class Case:
    rows: int
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.prompt}/{self.output}"


def play_cases(model: str, ranks: int, cases: list[Case], runs: int, options: dict[str, Any]) -> list[float]:
    """Returns tokens a second of each case. Imports the engine here: other processes only wait."""
    from chorale import LLM, SamplingParams

    found = []
    with LLM(model, tensor_parallel_size=ranks, enable_prefix_caching=False, **options) as llm:
        rng, most = np.random.default_rng(0), min(WORDS, llm.info.vocab_size)

        def seconds(case: Case, output: int) -> float:
            prompts = [
                {"prompt_token_ids": rng.integers(0, most, case.prompt).tolist()} for _ in range(case.rows)
            ]
            params = SamplingParams(temperature=1, ignore_eos=True, max_tokens=output, detokenize=False)
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            elapsed = time.perf_counter() - began
            assert all(len(each.outputs[0].token_ids) == output for each in outputs)
            return elapsed

        for case in cases:
            seconds(case, min(case.output, 8))
            if case.output == 1:
                found.append(case.rows * case.prompt / min(seconds(case, 1) for _ in range(runs)))
            else:
                rest = [seconds(case, case.output) - seconds(case, 1) for _ in range(runs)]
                found.append(case.rows * (case.output - 1) / statistics.median(rest))
            print(f"{ranks} ranks, {case}: {found[-1]:,.0f} tokens/s", file=sys.stderr, flush=True)
    return found


def in_a_process(ranks: int) -> list[float]:
    """The cases of one number of ranks. Raises ``CalledProcessError`` if they fail."""
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--one", str(ranks)], check=True, stdout=subprocess.PIPE
    )
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def server(given: argparse.Namespace, engines: int) -> Iterator[str]:
    """``chorale serve`` with so many engines. Yields its base URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "chorale", "serve", given.model, "--port", url.rpartition(":")[2]]
    command += ["--data-parallel-size", str(engines), "--device", given.device, *flags(given.options)]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as running:
        try:
            until = time.monotonic() + PATIENCE
            while not is_up(url):
                if running.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"no server: {log.read()[-4000:].decode(errors='replace')}")
                time.sleep(0.2)
            yield url
        finally:
            running.send_signal(signal.SIGINT)
            running.wait()


def flags(options: dict[str, Any]) -> list[str]:
    """Options of ``LLM`` as those of ``chorale serve``."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def serve_rate(given: argparse.Namespace, engines: int) -> float:
    """Output tokens a second through one port."""
    prompt, output = given.lengths
    with server(given, engines) as url, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "chorale", "bench", "serve", "--base-url", url, "--disable-tqdm"]
        command += ["--random-input-len", str(prompt), "--random-output-len", str(output), "--ignore-eos"]
        command += ["--temperature", "1", "--max-concurrency", str(given.streams)]
        command += ["--num-prompts", str(2 * given.streams), "--save-result", "--result-dir", folder]
        for seed in ("1", "2"):
            subprocess.run(
                [*command, "--seed", seed, "--result-filename", seed], check=True, stdout=sys.stderr
            )
        result = json.loads((Path(folder) / "2").read_text())
    assert result["completed"] == 2 * given.streams, f"only {result['completed']} requests completed"
    return float(result["output_throughput"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--engines", type=int, nargs="*", default=[])
    parser.add_argument("--cases", nargs="*", default=CASES, metavar="ROWS:PROMPT:OUTPUT")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", type=int, default=2048)
    parser.add_argument("--lengths", type=int, nargs=2, default=(1024, 1024), metavar=("PROMPT", "OUTPUT"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--options", type=json.loads, default={}, help="of LLM and of chorale serve, as JSON")
    parser.add_argument("--json", default="")
    parser.add_argument("--one", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def show(what: str, numbers: list[int], rows: dict[str, list[float]]) -> None:
    print(f"\n{'tokens a second':>24}" + "".join(f"{f'{number} {what}':>22}" for number in numbers))
    for name, rates in rows.items():
        cells = (f"{rate:,.0f} ({rate / rates[0]:.2f})" for rate in rates)
        print(f"{name:>24}" + "".join(f"{cell:>22}" for cell in cells))


def main() -> None:
    given = arguments()
    cases = [Case(*map(int, case.split(":"))) for case in given.cases]
    if given.one:
        options = {"device": given.device} | given.options
        print(json.dumps(play_cases(given.model, given.one, cases, given.runs, options)))
        return
    found: dict[str, Any] = {"model": given.model, "ranks": {}, "engines": {}}
    for ranks in given.ranks:
        found["ranks"][ranks] = in_a_process(ranks)
    for engines in given.engines:
        found["engines"][engines] = serve_rate(given, engines)
    if given.ranks:
        columns = [found["ranks"][ranks] for ranks in given.ranks]
        show(
            "ranks", given.ranks, {str(case): list(each) for case, *each in zip(cases, *columns, strict=True)}
        )
    if given.engines:
        name = f"{given.streams} streams, {'/'.join(map(str, given.lengths))}"
        show("engines", given.engines, {name: [found["engines"][each] for each in given.engines]})
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
