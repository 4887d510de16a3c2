"""vLLM's periodic log lines: throughput, every ten seconds while there is work, and speculative decoding."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator

from chorale.client.base import EngineClient, EngineView
from chorale.client.summary import add_columns
from chorale.engine.types import EngineStats
from chorale.errors import ChoraleError

logger = logging.getLogger("chorale.stats")

HIT_RATE_LINES = 30  # lines over which the prefix cache's hit rate is averaged: five minutes by default

Since = Callable[[str], int]  # field of ``EngineStats`` -> its increase since the last call


class Throughput:
    """Formats the lines of one engine. ``now``: seconds of any monotonic clock."""

    def __init__(self, stats: EngineStats, now: float, engine: int = 0) -> None:
        self._engine = engine
        self._stats, self._time = stats, now
        self._was_busy = False
        self._cache: deque[tuple[int, int]] = deque(maxlen=HIT_RATE_LINES)

    def lines(
        self, stats: EngineStats, now: float, num_positions: int = 0, *, is_synthetic: bool = False
    ) -> list[str]:
        """Returns the lines for the time since the last call.

        There is one on throughput, unless two intervals had no work, and one on drafts, if any were made.
        ``num_positions``: tokens of the longest possible draft.
        """
        before, seconds = self._stats, max(now - self._time, 1e-9)
        self._stats, self._time = stats, now
        if stats.num_steps < before.num_steps:  # a restarted engine counts from zero
            before = EngineStats()

        def since(field: str) -> int:
            return int(getattr(stats, field) - getattr(before, field))

        lines = []
        prompt = since("prompt_tokens") - since("cached_prompt_tokens")  # without cached ones, as in vLLM
        is_busy = bool(prompt or since("generation_tokens") or stats.num_running or stats.num_waiting)
        if is_busy or self._was_busy:
            self._cache.append((since("prefix_cache_queries"), since("prefix_cache_hits")))
            lines.append(", ".join(self._throughput(stats, since, prompt, seconds)))
        self._was_busy = is_busy
        if since("num_drafts"):
            old = [-count for count in before.accepted_per_position]
            accepted = add_columns([stats.accepted_per_position, old, (0,) * num_positions])
            label = "SYNTHETIC ACCEPTANCE, the output has no meaning: " if is_synthetic else ""
            lines.append(label + ", ".join(_drafts(since, accepted, seconds)))
        return [f"Engine {self._engine:03}: {line}" for line in lines]

    def _throughput(self, stats: EngineStats, since: Since, prompt: int, seconds: float) -> Iterator[str]:
        queries, hits = (sum(column) for column in zip(*self._cache, strict=True))
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s"
        yield f"Avg generation throughput: {since('generation_tokens') / seconds:.1f} tokens/s"
        yield f"Running: {stats.num_running} reqs"
        yield f"Waiting: {stats.num_waiting} reqs"
        if preemptions := since("num_preemptions"):
            yield f"Preemptions: {preemptions}"
        yield f"GPU KV cache usage: {100 * used:.1f}%"
        yield f"Prefix cache hit rate: {100 * hits / queries if queries else 0.0:.1f}%"


def _drafts(since: Since, by_position: tuple[int, ...], seconds: float) -> Iterator[str]:
    """Yields the fields of the line on drafts. The acceptance length includes the token after a draft."""
    drafts, drafted, accepted = map(since, ("num_drafts", "num_draft_tokens", "num_accepted_tokens"))
    rates = ", ".join(f"{count / drafts:.3f}" for count in by_position)
    yield f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}"
    yield f"Accepted throughput: {accepted / seconds:.2f} tokens/s"
    yield f"Drafted throughput: {drafted / seconds:.2f} tokens/s"
    yield f"Accepted: {accepted} tokens"
    yield f"Drafted: {drafted} tokens"
    yield f"Per-position acceptance rate: {rates}"
    yield f"Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%"


async def log_throughput(client: EngineClient, interval: float) -> None:
    """Logs the lines of each engine every ``interval`` seconds until cancelled."""
    throughputs: list[Throughput] = []
    while True:
        engines, now = client.engines, time.monotonic()
        for index in range(len(throughputs), len(engines)):  # a fleet may add engines
            throughputs.append(Throughput(engines[index].stats, now, index))
        await asyncio.sleep(interval)
        for engine, throughput in zip(engines, throughputs, strict=False):
            for line in _lines(engine, throughput):
                logger.info("%s", line)


def _lines(engine: EngineView, throughput: Throughput) -> list[str]:
    now = time.monotonic()
    try:
        info = engine.info
    except ChoraleError:  # the engine is not ready
        return throughput.lines(engine.stats, now)
    most, is_synthetic = info.num_speculative_tokens, info.synthetic_acceptance
    return throughput.lines(engine.stats, now, most, is_synthetic=is_synthetic)
