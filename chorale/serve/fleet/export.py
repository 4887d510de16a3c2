"""Exports metrics to Ray, which labels them with deployment and replica and serves them to Prometheus.

As for vLLM under Ray, names are those of ``/metrics`` with an underscore instead of the colon:
``vllm:num_requests_running`` becomes ``ray_vllm_num_requests_running`` in Prometheus. Every series is a gauge
in Ray, whose API cannot set a counter or a histogram bucket to a value. Names and meaning stay the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ray.serve import metrics as ray_metrics

logger = logging.getLogger(__name__)
INTERVAL = 5.0  # seconds between two exports
PREFIXES = ("vllm:", "chorale:")


class RayExport:
    """Sets Ray gauges to the samples that have changed. ``leave_out``: labels that are not exported."""

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
        series = name, tuple(kept.get(key, "") for key in keys)
        if self._last.get(series) != value:
            self._last[series] = value
            gauge.set(value, tags=dict(zip(keys, series[1], strict=True)))


async def export_forever(collect: Callable[[], Iterable[Any]], *, leave_out: Collection[str] = ()) -> None:
    """Exports metrics until cancelled. Continues after an error, and logs only the first one."""
    export, has_failed = RayExport(leave_out=leave_out), False
    while True:
        try:
            export.update(collect())
        except Exception:
            if not has_failed:
                logger.exception("metrics could not be exported to Ray")
            has_failed = True
        await asyncio.sleep(INTERVAL)
