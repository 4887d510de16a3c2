"""Prompts and reports shared by the CPU benchmarks."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Sequence

PROMPTS = (75, 512, 2000)
DECODED = 64
Seconds = Callable[[int, int], float]  # (prompt tokens, generated tokens) -> seconds of one request


def random_prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(1000, 190_000) for _ in range(length)]


def report(seconds: Seconds, prompts: Sequence[int]) -> float:
    """Prints prompt and decode speed and the peak memory. Returns the seconds per decoded token."""
    seconds(8, 4)
    for length in prompts:
        first = seconds(length, 1)
        print(f"prompt of {length:5d}     {first:8.2f} s, {length / first:.0f} tokens/s")
    decode = (seconds(8, 1 + DECODED) - seconds(8, 1)) / DECODED
    print(f"decode              {1 / decode:8.2f} tokens/s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory         {peak / 1e9:8.2f} GB, mapped files included")
    return decode
