"""Export of metrics to Ray, which adds deployment and replica to them and serves each node's to Prometheus.

Names are those of ``/metrics`` with an underscore for the colon, as vLLM's are under Ray:
``vllm:num_requests_running`` becomes ``ray_vllm_num_requests_running`` in Prometheus. Every series is a gauge
for Ray, which cannot set a counter or a bucket to a value; names and meaning stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ray.serve import metrics as ray_metrics

logger = logging.getLogger(__name__)
INTERVAL = 5.0  # seconds
PREFIXES = ("vllm:", "chorale:")


class RayExport:
    """Sets Ray's gauges to the samples that have changed. ``leave_out``: labels that say nothing here."""

    def __init__(
        self, make_gauge: Callable[..., Any] = ray_metrics.Gauge, leave_out: Collection[str] = ()
    ) -> None:
        self._make_gauge, self._leave_out = make_gauge, frozenset(leave_out)
        self._gauges: dict[str, tuple[Any, tuple[str, ...]]] = {}
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def update(self, families: Iterable[Any]) -> None:
        for family in families:
            if family.name.startswith(PREFIXES):
                for sample in family.samples:
                    self._set(sample.name, sample.labels, sample.value, family.documentation)

    def _set(self, name: str, labels: dict[str, str], value: float, doc: str) -> None:
        kept = {key: text for key, text in labels.items() if key not in self._leave_out}
        known = self._gauges.get(name)
        if known is None:
            keys = tuple(kept)
            gauge = self._make_gauge(name.replace(":", "_"), description=doc, tag_keys=keys)
            known = self._gauges[name] = gauge, keys
        gauge, keys = known
        place = name, tuple(kept.get(key, "") for key in keys)
        if self._last.get(place) != value:
            self._last[place] = value
            gauge.set(value, tags=dict(zip(keys, place[1], strict=True)))


async def export_forever(
    collect: Callable[[], Iterable[Any]], *, leave_out: Collection[str] = (), interval: float = INTERVAL
) -> None:
    """Exports until cancelled. A fault is logged once and does not end it."""
    export, has_failed = RayExport(leave_out=leave_out), False
    while True:
        try:
            export.update(collect())
        except Exception:
            if not has_failed:
                logger.exception("metrics could not be given to Ray")
            has_failed = True
        await asyncio.sleep(interval)
