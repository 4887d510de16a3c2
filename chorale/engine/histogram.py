"""Histograms, and vLLM's buckets of those that the engine keeps and its statistics carry."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BLOCK_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
)  # fmt: skip


class Histogram(msgspec.Struct):
    """A histogram. ``counts[i]`` observations fell into bucket ``i``; the last bucket is unbounded."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    @property
    def values(self) -> tuple[float, ...]:
        """Returns the counts, then the sum of all observed values."""
        return (*self.counts, self.total)

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns Prometheus buckets: (upper bound, number of observations up to it)."""
        found, sum_so_far = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            sum_so_far += count
            found.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(sum_so_far)))
        return found
