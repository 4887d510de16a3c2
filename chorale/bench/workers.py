"""Load from several processes: one reads some 40,000 events a second, and a fast server sends more.

A worker is ``python -m chorale.bench.workers``: its jobs come as JSON on the standard input, its outcomes
leave as JSON lines on the standard output.
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

from chorale.bench.connection import Target
from chorale.bench.load import Job, Load, Outcome, Pace, to_json
from chorale.errors import ChoraleError
from chorale.processes import die_with_parent


def run_load(
    target: Target, pace: Pace, jobs: Sequence[Job], processes: int, on_done: Callable[[Outcome], None]
) -> tuple[list[Outcome], float]:
    """(outcomes, seconds from the first start to the last end). Raises ``ChoraleError`` if a worker dies."""
    processes = max(1, min(processes, len(jobs), pace.concurrency or len(jobs)))
    if processes == 1:
        outcomes = asyncio.run(Load(target, pace, on_done).run(jobs))
    else:
        outcomes = _in_workers(target, pace, jobs, processes, on_done)
    begin = min((each.start for each in outcomes), default=0.0)
    return outcomes, max((each.start + each.latency for each in outcomes), default=0.0) - begin


def share(pace: Pace, number: int, of: int) -> Pace:
    """What one of several workers does of a load: its part of the rate and of the concurrency."""
    limit = pace.concurrency
    if limit is not None:
        limit = limit // of + (1 if number < limit % of else 0)
    rates = {"rate": pace.rate / of, "last_rate": pace.last_rate / of}
    return replace(pace, concurrency=limit, seed=pace.seed + number, **rates)


def _in_workers(
    target: Target, pace: Pace, jobs: Sequence[Job], processes: int, on_done: Callable[[Outcome], None]
) -> list[Outcome]:
    at = time.time() + 1.0 + 0.25 * processes  # when all begin: they take this long to start
    outcomes: list[Outcome] = []
    threads, running = [], []
    for number in range(processes):
        order = {
            "target": asdict(target), "pace": asdict(share(pace, number, processes)),
            "jobs": [asdict(each) for each in jobs[number::processes]], "at": at, "parent": os.getpid(),
        }  # fmt: skip
        worker = subprocess.Popen(
            [sys.executable, "-m", "chorale.bench.workers"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        running.append(worker)
        thread = threading.Thread(target=_talk, args=(worker, json.dumps(order), outcomes, on_done))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    if any(worker.wait() for worker in running):
        raise ChoraleError("a load worker ended early; its error is above")
    return outcomes


def _talk(
    worker: subprocess.Popen[bytes], order: str, outcomes: list[Outcome], on_done: Callable[[Outcome], None]
) -> None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(order.encode())
    worker.stdin.close()
    with worker.stdout as lines:
        for line in lines:
            outcome = Outcome(**json.loads(line))
            outcomes.append(outcome)
            on_done(outcome)


def main() -> None:
    order: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    die_with_parent(order["parent"])
    target = Target(order["target"]["url"], tuple(tuple(pair) for pair in order["target"]["headers"]))
    load = Load(target, Pace(**order["pace"]))
    jobs = [Job(**each) for each in order["jobs"]]
    time.sleep(max(0.0, order["at"] - time.time()))
    for outcome in asyncio.run(load.run(jobs)):
        sys.stdout.write(to_json(outcome) + "\n")


if __name__ == "__main__":
    main()
