"""vLLM's periodic throughput log line: one every ten seconds while there is work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from chorale.api.telemetry.draft_log import DraftLog
from chorale.client.base import EngineClient, EngineView
from chorale.engine.types import EngineStats
from chorale.errors import ChoraleError

logger = logging.getLogger("chorale.stats")

HIT_RATE_LINES = 30  # lines over which the prefix cache's hit rate is averaged: five minutes by default


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts since the previous line."""

    prompt: int  # computed tokens, without cached ones, as in vLLM
    generated: int
    preemptions: int
    queries: int
    hits: int

    @classmethod
    def between(cls, before: EngineStats, now: EngineStats) -> _Counts:
        if now.num_steps < before.num_steps:  # a restarted engine counts from zero
            before = EngineStats()
        return cls(
            (now.prompt_tokens - now.cached_prompt_tokens)
            - (before.prompt_tokens - before.cached_prompt_tokens),
            now.generation_tokens - before.generation_tokens,
            now.num_preemptions - before.num_preemptions,
            now.prefix_cache_queries - before.prefix_cache_queries,
            now.prefix_cache_hits - before.prefix_cache_hits,
        )


class Throughput:
    """Formats the lines of one engine. ``now``: seconds of any monotonic clock."""

    def __init__(self, stats: EngineStats, now: float, engine: int = 0) -> None:
        self._engine = engine
        self._stats, self._time = stats, now
        self._was_busy = False
        self._cache: deque[tuple[int, int]] = deque(maxlen=HIT_RATE_LINES)

    def line(self, stats: EngineStats, now: float) -> str | None:
        """Returns a line about the time since the last call, or None if two intervals passed without work."""
        counts, seconds = _Counts.between(self._stats, stats), max(now - self._time, 1e-9)
        self._stats, self._time = stats, now
        is_busy = bool(counts.prompt or counts.generated or stats.num_running or stats.num_waiting)
        if not is_busy and not self._was_busy:
            return None
        self._was_busy = is_busy
        self._cache.append((counts.queries, counts.hits))
        return ", ".join(self._parts(stats, counts, seconds))

    def _parts(self, stats: EngineStats, counts: _Counts, seconds: float) -> Iterator[str]:
        queries, hits = (sum(column) for column in zip(*self._cache, strict=True))
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield f"Engine {self._engine:03}: Avg prompt throughput: {counts.prompt / seconds:.1f} tokens/s"
        yield f"Avg generation throughput: {counts.generated / seconds:.1f} tokens/s"
        yield f"Running: {stats.num_running} reqs"
        yield f"Waiting: {stats.num_waiting} reqs"
        if counts.preemptions:
            yield f"Preemptions: {counts.preemptions}"
        yield f"GPU KV cache usage: {100 * used:.1f}%"
        yield f"Prefix cache hit rate: {100 * hits / queries if queries else 0.0:.1f}%"


async def log_throughput(client: EngineClient, interval: float) -> None:
    """Logs a line for each engine every ``interval`` seconds until cancelled, and one about its drafts."""
    throughputs: list[Throughput] = []
    drafts: list[DraftLog] = []
    while True:
        engines, now = client.engines, time.monotonic()
        for index in range(len(throughputs), len(engines)):  # of a fleet, more may come
            throughputs.append(Throughput(engines[index].stats, now, index))
            drafts.append(DraftLog(engines[index].stats, now, index))
        await asyncio.sleep(interval)
        engines = engines[: len(throughputs)]
        for engine, throughput, draft_log in zip(engines, throughputs, drafts, strict=True):
            stats, now = engine.stats, time.monotonic()
            for line in (throughput.line(stats, now), _draft_line(engine, draft_log, now)):
                if line is not None:
                    logger.info("%s", line)


def _draft_line(engine: EngineView, log: DraftLog, now: float) -> str | None:
    try:
        info = engine.info
    except ChoraleError:  # it is not ready
        return None
    most, is_synthetic = info.num_speculative_tokens, info.synthetic_acceptance
    return log.line(engine.stats, now, most, is_synthetic=is_synthetic)
