"""Runs each rank's kernels in Triton's interpreter, in a separate process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as processes
from triton.runtime import interpreter

from chorale.machine.processes import die_with_parent

SECONDS = 60.0  # longest wait for a rank on a busy machine
FORK = processes.get_context("fork")  # torch and Triton are imported once
Work = Callable[[int, Callable[[Any], None]], None]


def on_ranks(size: int, labels: Iterable[str], work: Work) -> None:
    """Runs ``work(rank, send)`` on each rank; what it sends for each label must be equal on all ranks."""
    parent, pipes = os.getpid(), [FORK.Pipe(duplex=False) for _ in range(size)]

    def run_rank(rank: int, result: Connection) -> None:
        die_with_parent(parent)
        torch.set_num_threads(1)
        _yield_between_polls()
        work(rank, result.send)

    started = [FORK.Process(target=run_rank, args=(rank, end)) for rank, (_, end) in enumerate(pipes)]
    for process in started:
        process.start()
    for _, end in pipes:
        end.close()  # so that the pipe closes when the rank fails
    for label in labels:
        try:
            found = [begin.recv() for begin, _ in pipes]
        except EOFError:
            time.sleep(1)  # a failed rank takes a moment to exit
            raise AssertionError(f"{label}: ranks ended with {[each.exitcode for each in started]}") from None
        for rank, each in enumerate(found):
            assert each == found[0], f"{label}: rank {rank} has other results than rank 0"
        print(f"{label}, {size} ranks: {len(found[0])} results, equal on all", flush=True)
    for process in started:
        process.join()
    assert all(process.exitcode == 0 for process in started)


def _yield_between_polls() -> None:
    """Makes a waiting rank yield its processor at each poll of the status."""
    builder = interpreter.InterpreterBuilder
    load = builder.create_load

    def create_load(self: Any, *arguments: Any) -> Any:
        if arguments[-1]:  # volatile
            time.sleep(1e-3)
        return load(self, *arguments)

    builder.create_load = create_load
