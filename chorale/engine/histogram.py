"""Counts: a histogram that the engine keeps and its statistics carry, with vLLM's buckets."""

from __future__ import annotations

from bisect import bisect_left

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BLOCK_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
)  # fmt: skip


class Counts:
    """``bounds``: upper bounds of the buckets; one more bucket has none."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def values(self) -> tuple[float, ...]:
        """Returns the number of observations in each bucket, then the sum of all observed values."""
        return (*self._counts, self._total)
