"""``chorale run-batch`` against ``LLM.chat`` on the same conversations, each in a process of its own.

    python benchmarks/run_batch.py [--model demo] [--lines 300] [--max-tokens 64] [--rounds 3]

Start-up is not counted: wall time is from the first request to the last answer. CPU time is that of the
process with its children, less that of the same run with one request. On a shared machine compare CPU time.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OFFLINE = """
import json, sys, time
from chorale import LLM, SamplingParams
model, path, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
bodies = [json.loads(line)["body"] for line in open(path)]
with LLM(model) as llm:
    params = [SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True) for _ in bodies]
    began = time.perf_counter()
    llm.chat([body["messages"] for body in bodies], params, use_tqdm=False)
    print("seconds", time.perf_counter() - began)
"""


def write_lines(path: Path, model: str, count: int, tokens: int) -> None:
    with path.open("w") as file:
        for i in range(count):
            messages = [{"role": "user", "content": f"Tell me of the number {i} and of {i * 7} as well."}]
            body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0.0}
            line = {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps(line | {"body": body | {"ignore_eos": True}}) + "\n")


def measure(command: list[str]) -> tuple[float, float]:
    """Returns seconds of wall time that the command reports, and of CPU time of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"seconds ([\d.]+)|lines? in ([\d.]+) s", done.stdout + done.stderr)
    assert found, done.stdout + done.stderr
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return float(found[1] or found[2]), cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = {1: Path(folder, "one.jsonl"), given.lines: Path(folder, "all.jsonl")}
        for count, path in paths.items():
            write_lines(path, given.model, count, given.max_tokens)
        rows: dict[str, list[tuple[float, float]]] = {"LLM.chat": [], "run-batch": []}
        for _ in range(given.rounds):  # in turns, so that the machine's load meets both
            for name in rows:
                found = []
                for path in paths.values():
                    output = ["-i", str(path), "-o", str(Path(folder, "out.jsonl")), "--model", given.model]
                    command = (
                        [sys.executable, "-m", "chorale", "run-batch", *output]
                        if name == "run-batch"
                        else [sys.executable, "-c", OFFLINE, given.model, str(path), str(given.max_tokens)]
                    )
                    found.append(measure(command))
                rows[name].append((found[1][0], found[1][1] - found[0][1]))
    print(f"{given.lines} lines of {given.max_tokens} tokens, {given.model}, {time.strftime('%Y-%m-%d')}")
    print(f"{'':<10} {'wall s':>8} {'CPU s':>8} {'ms a line (wall, CPU)':>24}")
    for name, results in rows.items():
        wall, cpu = (statistics.median(column) for column in zip(*results, strict=True))
        each = f"{1000 * wall / given.lines:.2f}, {1000 * cpu / given.lines:.2f}"
        print(f"{name:<10} {wall:8.2f} {cpu:8.2f} {each:>24}")


if __name__ == "__main__":
    main()
