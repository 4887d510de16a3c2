"""Timing of repeated calls, shared by all benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable


def times(
    work: Callable[[], object],
    repeats: int,
    *,
    warm: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Returns the seconds of each of ``repeats`` calls, in order, after ``warm`` calls that are not counted.

    ``clock``: ``time.thread_time`` or ``time.process_time`` on a machine that does other work.
    """
    found = []
    for number in range(warm + repeats):
        start = clock()
        work()
        if number >= warm:
            found.append(clock() - start)
    return found


def spent(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the seconds of one call."""
    return times(work, 1, clock=clock)[0]
