"""Gaps between the tokens of running streams while prompts arrive, and the full load, by --prompt-delay.

    python benchmarks/gpu_gaps.py LOGS [--model 20b] [--delays 0 0.012] [--budget 330]

For each bound (seconds that prompts may add to a step; 0: none) a server of its own is started: ``chorale
serve`` over a random checkpoint of the published size, prefix caching off. Then, after a warm-up, over HTTP:

``gaps``   Poisson arrivals, 20 a second, 1,024 tokens in and 512 out, for ``--seconds``
``full``   1,024 requests at once, 1,024 in and 1,024 out (for the first ``--full`` bounds)

LOGS gets the server's and the load's whole output and result files; the table is printed line by line. Times
are milliseconds; ``tok/s`` counts output tokens from the first request's start to the last token. No run is
begun that would not end within ``--budget`` seconds; on an H200 a start takes 10 s, ``full`` 50 s. ``--serve
--compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'`` leaves mixed steps without graphs. ``--model
demo --rate 1 --lengths 200 30 --streams 8 --full-lengths 50 20`` tries the script out on a CPU.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2

CHORALE = (sys.executable, "-m", "chorale")
READY_SECONDS = 120


def make_checkpoint(model: str, scratch: Path, logs: Path) -> str:
    """The folder of a random checkpoint, made if it is not there; a folder's or the demo's own name."""
    if model not in ("20b", "120b"):
        return model
    folder = scratch / f"random-{model}"
    if not (folder / "config.json").exists():
        command = [*CHORALE, "bench", "make-checkpoint", model, str(folder), "--threads", "12"]
        with (logs / "checkpoint.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return str(folder)


class Server:
    """``chorale serve`` while the ``with`` block runs."""

    def __init__(self, model: str, delay: float, port: int, log: Path, options: list[str]) -> None:
        command = [*CHORALE, "serve", model, "--port", str(port), "--no-enable-prefix-caching"]
        command += ["--prompt-delay", str(delay), *options]
        self._log = log.open("w")
        self._url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Server:
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if httpx2.get(f"{self._url}/health", timeout=2).status_code == 200:
                    return self
            except httpx2.HTTPError:
                pass
            time.sleep(0.2)
        self.__exit__()
        raise SystemExit(f"the server was not ready: {self._log.name}")

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.send_signal(signal.SIGINT)  # the second one cuts what still runs
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def load(logs: Path, name: str, port: int, lengths: list[int], prompts: int, *pace: str) -> dict[str, Any]:
    """One ``chorale bench serve``; the keys of its result file."""
    result = logs / f"{name}.json"
    command = [*CHORALE, "bench", "serve", "--port", str(port), "--temperature", "1", "--ignore-eos"]
    command += [
        "--num-prompts",
        str(prompts),
        "--input-len",
        str(lengths[0]),
        "--output-len",
        str(lengths[1]),
    ]
    command += [
        "--metric-percentiles",
        "50,99,99.9,100",
        "--disable-tqdm",
        "--result-filename",
        str(result),
        *pace,
    ]
    with (logs / f"{name}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return dict(json.loads(result.read_text()))


def show(name: str, found: dict[str, Any]) -> None:
    def cells(metric: str) -> str:
        return " ".join(f"{found[f'p{share}_{metric}_ms']:8.1f}" for share in ("50", "99", "99.9", "100"))

    print(
        f"{name:18s} ITL {cells('itl')} | TTFT {cells('ttft')} | TPOT {found['p50_tpot_ms']:6.2f} | "
        f"{found['output_throughput']:8,.0f} tok/s | {found['completed']} done, {found['failed']} failed",
        flush=True,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(model: str, delay: float, given: argparse.Namespace, *, full: bool) -> None:
    port, name = free_port(), f"{delay * 1e3:g}ms"
    log = given.logs / f"server-{name}.log"
    began = time.monotonic()
    with Server(model, delay, port, log, given.serve):
        print(f"# {name}: ready after {time.monotonic() - began:.0f} s", flush=True)
        pace = ("--request-rate", str(given.rate))
        warm = max(4, int(given.rate * given.warm_up))  # what is compiled or captured when it is needed
        load(given.logs, f"warm-{name}", port, given.lengths, warm, *pace)
        found = load(given.logs, f"gaps-{name}", port, given.lengths, int(given.rate * given.seconds), *pace)
        show(f"gaps {name}", found)
        if full:
            show(f"full {name}", load(given.logs, f"full-{name}", port, given.full_lengths, given.streams))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--model", default="20b", help="20b, 120b, demo, or a folder")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.012])
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds")
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--lengths", type=int, nargs=2, default=[1024, 512])
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--full", type=int, default=2, help="so many of the bounds also get the full load")
    parser.add_argument("--full-lengths", type=int, nargs=2, default=[1024, 1024])
    parser.add_argument("--budget", type=float, default=330.0, help="seconds for everything")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"), help="where checkpoints are made")
    parser.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[], help="further options of chorale serve"
    )
    given = parser.parse_args()
    began = time.monotonic()
    given.logs.mkdir(parents=True, exist_ok=True)
    model = make_checkpoint(given.model, given.scratch, given.logs)
    print(f"# checkpoint after {time.monotonic() - began:.0f} s; columns: p50 p99 p99.9 max", flush=True)
    for number, delay in enumerate(given.delays):
        full = number < given.full
        needed = given.warm_up + given.seconds + 35 + (55 if full else 0)
        if time.monotonic() - began + needed > given.budget:
            print(f"# {delay * 1e3:g}ms: no time left", flush=True)
            continue
        measure(model, delay, given, full=full)
    print(f"# {time.monotonic() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
