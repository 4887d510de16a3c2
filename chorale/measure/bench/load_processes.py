"""Sends requests from several processes: one reads some 40,000 events a second, a fast server sends more.

A load process is ``python -m chorale.measure.bench.load_processes``. It reads its requests as JSON from
standard input and writes outcomes as JSON lines to standard output.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from chorale.errors import ChoraleError
from chorale.machine.processes import die_with_parent, module_command
from chorale.measure.bench.connection import Target
from chorale.measure.bench.load import Load, LoadRequest, Outcome, Pace, to_json


def run_load(
    target: Target,
    pace: Pace,
    requests: Sequence[LoadRequest],
    processes: int,
    on_done: Callable[[Outcome], None],
) -> tuple[list[Outcome], float]:
    """Returns the outcomes and the seconds from first start to last end. Raises ``ChoraleError``."""
    processes = max(1, min(processes, len(requests), pace.concurrency or len(requests)))
    if processes == 1:
        outcomes = asyncio.run(Load(target, pace, on_done).run(requests))
    else:
        outcomes = _in_processes(target, pace, requests, processes, on_done)
    begin = min((each.start for each in outcomes), default=0.0)
    return outcomes, max((each.start + each.latency for each in outcomes), default=0.0) - begin


def share(pace: Pace, number: int, of: int) -> Pace:
    """Returns the pace of one process: its share of the rate and of the concurrency."""
    limit = pace.concurrency
    if limit is not None:
        limit = limit // of + (1 if number < limit % of else 0)
    return replace(
        pace, concurrency=limit, seed=pace.seed + number, rate=pace.rate / of, last_rate=pace.last_rate / of
    )


def _in_processes(
    target: Target,
    pace: Pace,
    requests: Sequence[LoadRequest],
    processes: int,
    on_done: Callable[[Outcome], None],
) -> list[Outcome]:
    at = time.time() + 1.0 + 0.25 * processes  # common start time, after all processes are up
    outcomes: list[Outcome] = []
    threads, running = [], []
    for number in range(processes):
        order = {
            "target": asdict(target), "pace": asdict(share(pace, number, processes)),
            "requests": [asdict(each) for each in requests[number::processes]],
            "at": at, "parent": os.getpid(),
        }  # fmt: skip
        process = subprocess.Popen(
            module_command("chorale.measure.bench.load_processes"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        running.append(process)
        thread = threading.Thread(target=_talk, args=(process, json.dumps(order), outcomes, on_done))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    if any(each.wait() for each in running):
        raise ChoraleError("a load process ended early; its error is printed above")
    return outcomes


def _talk(
    process: subprocess.Popen[bytes], order: str, outcomes: list[Outcome], on_done: Callable[[Outcome], None]
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(order.encode())
    process.stdin.close()
    with process.stdout as lines:
        for line in lines:
            outcome = Outcome(**json.loads(line))
            outcomes.append(outcome)
            on_done(outcome)


def main() -> None:
    order: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    die_with_parent(order["parent"])
    target = Target(order["target"]["url"], tuple(tuple(pair) for pair in order["target"]["headers"]))
    load = Load(target, Pace(**order["pace"]))
    requests = [LoadRequest(**each) for each in order["requests"]]
    time.sleep(max(0.0, order["at"] - time.time()))
    for outcome in asyncio.run(load.run(requests)):
        sys.stdout.write(to_json(outcome) + "\n")


if __name__ == "__main__":
    main()
