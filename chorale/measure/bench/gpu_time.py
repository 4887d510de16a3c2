"""GPU timing with CUDA events: medians, after one uncounted warm-up run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def event_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Returns the median seconds of the work that ``work`` enqueues on the current stream."""
    work()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def captured(work: Callable[[], Any], error_mode: str = "global") -> torch.cuda.CUDAGraph:
    """Captures ``work`` as a CUDA graph, after one run that compiles its kernels.

    ``error_mode``: "thread_local" if another thread calls CUDA meanwhile, as NCCL's watchdog does.
    """
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=error_mode):
        work()
    return graph


def graph_seconds(work: Callable[[], Any], repeats: int = 9) -> float:
    """Returns the median seconds of one replay of ``work`` as a CUDA graph."""
    return event_seconds(captured(work).replay, repeats)
