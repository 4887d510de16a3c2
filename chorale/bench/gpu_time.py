"""Times on a GPU, by its own events: medians, after one run that does not count."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def event_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Median seconds of what ``work`` puts on the current stream."""
    work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """``work`` as a CUDA graph, after one run that compiles what it needs."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def graph_seconds(work: Callable[[], Any], repeats: int = 9) -> float:
    """Median seconds of one replay of ``work`` as a CUDA graph."""
    return event_seconds(captured(work).replay, repeats)
