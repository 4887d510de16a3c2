"""Metrics that only some engines have: those that draft, as in vLLM, and those with a tier of host memory
(``--kv-offloading-size``), where names with the prefix vllm: are those of vLLM's offloading connector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from chorale.api.telemetry.engine_record import EngineRecord
from chorale.api.telemetry.metric_names import ACCEPTED_PER_POSITION, DRAFT_COUNTERS, HOST_COUNTERS
from chorale.api.telemetry.metric_types import ENGINE_LABELS
from chorale.engine.types import EngineStats

Rows = Sequence[tuple[list[str], EngineRecord, EngineStats]]  # an engine's labels, its record and its stats


def _counters(names: Mapping[str, tuple[str, str]], rows: Rows) -> Iterator[Any]:
    """``names``: the field of ``EngineRecord.totals`` and the help text of each counter."""
    for name, (field, doc) in names.items():
        family = CounterMetricFamily(name, doc, labels=list(ENGINE_LABELS))
        for labels, engine, stats in rows:
            family.add_metric(labels, engine.totals(stats)[field])
        yield family


def collect_drafts(engines: Sequence[tuple[EngineRecord, EngineStats]]) -> Iterator[Any]:
    """Yields the families of the engines that draft."""
    rows = [(list(engine.labels.values()), engine, stats) for engine, stats in engines if engine.has_drafts]
    if not rows:
        return
    yield from _counters(DRAFT_COUNTERS, rows)
    yield _info(rows)
    doc = "Draft tokens that were accepted, by their position in the draft"
    family = CounterMetricFamily(ACCEPTED_PER_POSITION, doc, labels=[*ENGINE_LABELS, "position"])
    for labels, engine, stats in rows:
        for position, count in enumerate(engine.accepted_per_position(stats)):
            family.add_metric([*labels, str(position)], count)
    yield family


def _info(rows: Rows) -> Any:
    """Returns how each engine drafts. A synthetic acceptance means that its output has no meaning."""
    names = [*ENGINE_LABELS, "drafts", "synthetic"]
    family = GaugeMetricFamily("chorale:speculation_info", "How tokens are drafted", labels=names)
    for labels, engine, _ in rows:
        if (info := engine.info) is not None:
            family.add_metric([*labels, info.speculation, str(info.synthetic_acceptance).lower()], 1)
    return family


def collect_host_tier(engines: Sequence[tuple[EngineRecord, EngineStats]]) -> Iterator[Any]:
    """Yields the families of the engines that have such a tier."""
    rows = [
        (list(engine.labels.values()), engine, stats) for engine, stats in engines if engine.has_host_tier
    ]
    if not rows:
        return
    yield from _counters(HOST_COUNTERS, rows)
    usage = GaugeMetricFamily(
        "vllm:kv_offload_cpu_cache_usage_perc",
        "Share of the KV pages in host memory that are in use, 0 to 1",
        labels=list(ENGINE_LABELS),
    )
    pages = GaugeMetricFamily(
        "chorale:host_kv_pages", "KV pages in host memory", labels=[*ENGINE_LABELS, "kind"]
    )
    for labels, _, stats in rows:
        usage.add_metric(labels, stats.host_pages_used / max(stats.host_pages_total, 1))
        pages.add_metric([*labels, "used"], stats.host_pages_used)
        pages.add_metric([*labels, "total"], stats.host_pages_total)
    yield usage
    yield pages
