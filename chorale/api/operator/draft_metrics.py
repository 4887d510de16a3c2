"""Metrics of speculative decoding, which only engines that do it have, as in vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from chorale.api.operator.engine_record import EngineRecord
from chorale.api.operator.metric_names import ACCEPTED_PER_POSITION, DRAFT_COUNTERS
from chorale.api.operator.metric_types import ENGINE_LABELS
from chorale.engine.types import EngineStats


def collect_drafts(engines: Sequence[tuple[EngineRecord, EngineStats]]) -> Iterator[Any]:
    """Yields the families of the engines that draft."""
    rows = [(list(engine.labels.values()), engine, stats) for engine, stats in engines if engine.has_drafts]
    if not rows:
        return
    for name, (field, doc) in DRAFT_COUNTERS.items():
        family = CounterMetricFamily(name, doc, labels=list(ENGINE_LABELS))
        for labels, engine, stats in rows:
            family.add_metric(labels, engine.totals(stats)[field])
        yield family
    yield _info(rows)
    doc = "Draft tokens that were accepted, by their position in the draft"
    family = CounterMetricFamily(ACCEPTED_PER_POSITION, doc, labels=[*ENGINE_LABELS, "position"])
    for labels, engine, stats in rows:
        for position, count in enumerate(engine.accepted_per_position(stats)):
            family.add_metric([*labels, str(position)], count)
    yield family


def _info(rows: Sequence[tuple[list[str], EngineRecord, EngineStats]]) -> Any:
    """Returns how each engine drafts. A synthetic acceptance means that its output has no meaning."""
    names = [*ENGINE_LABELS, "drafts", "synthetic"]
    family = GaugeMetricFamily("chorale:speculation_info", "How tokens are drafted", labels=names)
    for labels, engine, _ in rows:
        if (info := engine.info) is not None:
            family.add_metric([*labels, info.speculation, str(info.synthetic_acceptance).lower()], 1)
    return family
