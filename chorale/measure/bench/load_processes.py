"""Sends requests from several processes: one reads some 40,000 events a second, a fast server sends more.

A load process is ``python -m chorale.measure.bench.load_processes``. It reads its order from standard input
and writes its outcomes to standard output, both as msgpack.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec

from chorale.errors import ChoraleError
from chorale.machine.processes import die_with_parent, module_command
from chorale.measure.bench.connection import Target
from chorale.measure.bench.load import Load, LoadRequest, Outcome, Pace


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


class _Order(msgspec.Struct):
    """The work of a load process. ``at``: the Unix time of its start."""

    parent: int
    at: float
    target: Target
    pace: Pace
    requests: Sequence[LoadRequest]


def _in_processes(
    target: Target,
    pace: Pace,
    requests: Sequence[LoadRequest],
    processes: int,
    on_done: Callable[[Outcome], None],
) -> list[Outcome]:
    at = time.time() + 1.0 + 0.25 * processes  # common start time, after all processes are up

    def load(number: int) -> list[Outcome]:
        order = _Order(os.getpid(), at, target, share(pace, number, processes), requests[number::processes])
        command, given = module_command("chorale.measure.bench.load_processes"), msgspec.msgpack.encode(order)
        ended = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=False)
        if ended.returncode:
            raise ChoraleError("a load process ended early; its error is printed above")
        found = msgspec.msgpack.decode(ended.stdout, type=list[Outcome])
        for outcome in found:
            on_done(outcome)
        return found

    with ThreadPoolExecutor(processes) as pool:
        return [outcome for found in pool.map(load, range(processes)) for outcome in found]


def main() -> None:
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Order)
    die_with_parent(order.parent)
    time.sleep(max(0.0, order.at - time.time()))
    outcomes = asyncio.run(Load(order.target, order.pace).run(order.requests))
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcomes))


if __name__ == "__main__":
    main()
