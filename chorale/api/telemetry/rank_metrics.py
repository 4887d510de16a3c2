"""Metrics of how an engine computes, and of the processes that share its model (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily

from chorale.api.telemetry.metric_types import ENGINE_LABELS
from chorale.client.base import EngineInfo


def collect_ranks(engines: Iterable[tuple[list[str], EngineInfo]]) -> Iterator[Any]:
    """Yields the families. ``engines``: the values of each one's labels, and what it says of itself."""
    number = _gauge("chorale:ranks", "Processes that share the model (tensor parallelism)")
    memory = _gauge("chorale:rank_memory_bytes", "Memory that each rank takes", "kind", "rank")
    free = _gauge(
        "chorale:rank_free_memory_bytes", "Free memory of each rank's device before it loaded", "rank"
    )
    exchange = _gauge(
        "chorale:rank_exchange_info", "How ranks add their parts, and over what", "exchange", "links"
    )
    facts = ("device", "dtype", "kv_cache_dtype", "ops", "tensor_parallel_size")
    computes = _gauge("chorale:engine_info", "How the engine computes", *facts)
    for labels, info in engines:
        computes.add_metric([*labels, *(str(getattr(info, fact)) for fact in facts)], 1)
        number.add_metric(labels, info.tensor_parallel_size)
        for kind, sizes in info.rank_bytes.items():
            for rank, size in enumerate(sizes):
                memory.add_metric([*labels, kind, str(rank)], size)
        for rank, size in enumerate(info.rank_free_bytes):
            free.add_metric([*labels, str(rank)], size)
        if info.exchange:
            exchange.add_metric([*labels, info.exchange, info.rank_links], 1)
    yield from (computes, number, memory, free, exchange)


def _gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, labels=[*ENGINE_LABELS, *labels])
