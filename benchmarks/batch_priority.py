"""What a full batch costs the requests that people wait for: TTFT with a batch and without, in turns.

    python benchmarks/batch_priority.py [--seconds 20] [--pairs 4] [--rate 3] [-- SERVE OPTIONS]

Starts a server, and sends interactive requests at random moments. Phases with a batch that does not end
alternate with phases without one (it is cancelled), so that other load of the machine meets both alike.
Prints p50 and p99 of the time to the first token, of the time between tokens, and what the batch got done.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx2

LINES = 20_000


@dataclass
class Phase:
    first: list[float] = field(default_factory=list)  # seconds
    between: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_lines: int = 0


@contextlib.contextmanager
def server(model: str, options: list[str]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "chorale", "serve", model, "--port", str(port)]
        command += ["--response-store", f"{folder}/store.sqlite3", "--log-level", "error", *options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            address = f"http://127.0.0.1:{port}"
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if httpx2.get(f"{address}/ready").status_code == 200:
                        break
                time.sleep(0.2)
            yield address
        finally:
            process.terminate()
            process.wait()


async def begin(http: httpx2.AsyncClient) -> str:
    """Creates a batch that does not end, and waits until it is at work."""
    lines = b"\n".join(
        json.dumps(
            {
                "custom_id": str(index),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "messages": [{"role": "user", "content": f"What is {index} + {index % 77}?"}],
                    "max_tokens": 200,
                },
            }
        ).encode()
        for index in range(LINES)
    )
    answer = await http.post("/v1/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "batch"})
    body = {
        "input_file_id": answer.json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    batch_id = str((await http.post("/v1/batches", json=body)).json()["id"])
    while (await counts(http, batch_id))["completed"] == 0:
        await asyncio.sleep(0.1)
    return batch_id


async def counts(http: httpx2.AsyncClient, batch_id: str) -> dict[str, int]:
    return dict((await http.get(f"/v1/batches/{batch_id}")).json()["request_counts"])


async def ask(http: httpx2.AsyncClient, question: str, seen: Phase) -> None:
    body = {"messages": [{"role": "user", "content": question}], "stream": True, "max_tokens": 60}
    last = time.perf_counter()
    is_first = True
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {") or not json.loads(line[6:])["choices"]:
                continue
            delta = json.loads(line[6:])["choices"][0]["delta"]
            if not (delta.get("content") or delta.get("reasoning")):
                continue
            now = time.perf_counter()
            (seen.first if is_first else seen.between).append(now - last)
            is_first, last = False, now


async def phase(
    http: httpx2.AsyncClient, seconds: float, rate: float, rng: random.Random, seen: Phase
) -> None:
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while time.monotonic() - started < seconds:
            await asyncio.sleep(rng.expovariate(rate))
            group.create_task(ask(http, f"What is {rng.randrange(1000)} + {rng.randrange(1000)}?", seen))
    seen.seconds += time.monotonic() - started


async def measure(address: str, given: argparse.Namespace) -> tuple[Phase, Phase]:
    without, beside, rng = Phase(), Phase(), random.Random(5)
    async with httpx2.AsyncClient(base_url=address, timeout=120) as http:
        await phase(http, 3, given.rate, rng, Phase())  # warms up
        for _ in range(given.pairs):
            await phase(http, given.seconds, given.rate, rng, without)
            batch_id = await begin(http)
            before = (await counts(http, batch_id))["completed"]
            await phase(http, given.seconds, given.rate, rng, beside)
            beside.num_lines += (await counts(http, batch_id))["completed"] - before
            await http.post(f"/v1/batches/{batch_id}/cancel")
            while (await http.get(f"/v1/batches/{batch_id}")).json()["cancelled_at"] is None:
                await asyncio.sleep(0.1)
    return without, beside


def described(values: list[float]) -> str:
    cuts = statistics.quantiles(values, n=100)
    return f"p50 {cuts[49] * 1000:6.1f} ms, p90 {cuts[89] * 1000:6.1f} ms, p99 {cuts[98] * 1000:6.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3.0, help="interactive requests a second")
    parser.add_argument("options", nargs="*", help="options of chorale serve, after --")
    given = parser.parse_args()
    with server(given.model, given.options) as address:
        without, beside = asyncio.run(measure(address, given))
    for name, seen in (("without", without), ("beside a batch", beside)):
        print(f"{name:15} TTFT {described(seen.first)} ({len(seen.first)} requests)")
        print(f"{'':15} ITL  {described(seen.between)}")
    print(f"the batch: {beside.num_lines / beside.seconds:.1f} lines/s meanwhile")
    return 0


if __name__ == "__main__":
    sys.exit(main())
