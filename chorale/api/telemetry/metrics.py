"""/metrics: vLLM's metrics, so that its dashboards work unchanged, and Chorale's own under ``chorale:``.

``metric_names`` has the names and descriptions. ``Metrics`` is updated by the metered client, which sees
every token, by the HTTP middleware, and by endpoints for events that only they see (``repaired``).

With several API processes on one port, a scrape reaches any of them. Each process writes its counts to a file
in ``share`` once a second, and a scrape adds the other processes' files to its own counts, so the sums are at
most a second old. Engine metrics come from the engines' statistics, which every process receives in full;
they are not summed. With several engines, each has its own series under vLLM's label ``engine``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from chorale.api.telemetry.engine_metrics import collect_engines
from chorale.api.telemetry.engine_record import EngineRecord, Series, total
from chorale.api.telemetry.metric_names import (
    BY_SERVER,
    COUNTERS,
    HISTOGRAMS,
    REJECTIONS,
    STORE_GAUGES,
    Labels,
    is_http,
)
from chorale.client.base import EngineView
from chorale.errors import QueueFullError

if TYPE_CHECKING:
    from chorale.store.batches import BatchStats
    from chorale.store.protocol import StoreStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Engines(Protocol):
    """The part of an ``EngineClient`` that is measured."""

    @property
    def engines(self) -> Sequence[EngineView]: ...


class Metrics(Collector):
    """The metrics of one API process. ``create_app`` calls ``watch`` once.

    Each engine has a record. Metrics of no engine (HTTP, tools, the store) are in the first record's series.
    ``buckets``: --custom-histogram-buckets. ``log_stats=False`` leaves out the vllm: metrics, as in vLLM with
    --disable-log-stats.
    """

    def __init__(
        self,
        model_name: str = "",
        *,
        process: int = 0,
        share: Path | None = None,
        log_stats: bool = True,
        buckets: Mapping[str, Iterable[float]] = {},
    ) -> None:
        self._model_name, self._buckets = model_name, buckets
        self.engines = [self._new_record(0)]
        self.series = self.engines[0].series
        for reason in REJECTIONS:
            self.series.count("vllm:admission_rejections", (reason,), 0)
        self._client: Engines | None = None
        self._num_watched = 0
        self._labels = self.engines[0].labels
        self._gauges: dict[str, Mapping[Labels, float]] = {}  # samples of ``STORE_GAUGES``
        self.store_works(True)
        self.process, self._share, self._log_stats = process, share, log_stats
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._register_process()
        self._all_http = self.engines[0].histograms["http_request_duration_highr_seconds"]

    def _register_process(self) -> None:
        """Registers the process_* and python_* metrics of this process.

        With several API processes, each scrape would reach another process, so they are left out, as in vLLM.
        """
        if self._share is None:
            ProcessCollector(registry=self._registry)
            PlatformCollector(registry=self._registry)
            GCCollector(registry=self._registry)

    # ---------------------------------------------------------------- updates

    def watch(self, client: Engines) -> None:
        self._client = client
        self._watch_new()

    def _watch_new(self) -> None:
        """Creates the records of engines that were added since the last call."""
        engines = self._client.engines if self._client is not None else ()
        for index in range(self._num_watched, len(engines)):
            if index == len(self.engines):
                self.engines.append(self._new_record(index))
            self.engines[index].watch(engines[index])
        self._num_watched = len(engines)

    def _new_record(self, index: int) -> EngineRecord:
        return EngineRecord({"model_name": self._model_name, "engine": str(index)}, self._buckets)

    def record(self, engine: int) -> EngineRecord:
        """Returns the record of an engine, by its index."""
        if engine >= self._num_watched:
            self._watch_new()
        return self.engines[engine]

    def tool_called(self, tool: str, failed: bool) -> None:
        """Counts a tool call. ``tool``: browser, python or mcp."""
        self.series.count("chorale:tool_calls", (tool, "failed" if failed else "completed"))

    def rejected(self, error: QueueFullError) -> None:
        """Counts a request that a limit of the queue has refused."""
        self.series.count("chorale:queue_rejections")
        reason = error.code if error.code in REJECTIONS else REJECTIONS[0]
        self.series.count("vllm:admission_rejections", (reason,))

    def lines_answered(self, completed: int, failed: int) -> None:
        """Counts lines of batches, which no other request counter and no latency includes."""
        self.series.count("chorale:batch_lines", ("completed",), completed)
        self.series.count("chorale:batch_lines", ("failed",), failed)

    def repaired(self, repairs: Mapping[str, int]) -> None:
        """Counts ``TurnEnded.repairs``. The parser has a fixed set of kinds, never model output."""
        for kind, number in repairs.items():
            self.series.count("chorale:harmony_repairs", (kind,), number)

    def store_works(self, works: bool) -> None:
        """Records whether the last write to the response store succeeded."""
        self._gauges["chorale:response_store_up"] = {(): int(works)}

    def stored(self, stats: StoreStats) -> None:
        """Records the contents of the response store, which all processes share, so it is not summed."""
        self._gauges |= {
            "chorale:response_store_responses": {(): stats.num_responses},
            "chorale:response_store_conversations": {(): stats.num_conversations},
            "chorale:response_store_bytes": {(): stats.num_bytes},
            "chorale:background_responses": {(): stats.num_live},
        }

    def batches_stored(self, stats: BatchStats) -> None:
        """Records the batches and files, which all processes share too."""
        self._gauges |= {
            "chorale:files": {(): stats.num_files},
            "chorale:file_bytes": {(): stats.num_bytes},
            "chorale:batches": {(status,): number for status, number in stats.num_by_status.items()},
        }

    def http_finished(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Counts a request.

        ``handler``: the matched route's path template, which bounds the number of labels.
        """
        self.series.count("http_requests", (handler, method, f"{status // 100}xx"))
        _, bounds, _ = HISTOGRAMS["http_request_duration_seconds"]
        self.series.histogram("http_request_duration_seconds", bounds, (handler, method)).observe(seconds)
        self._all_http.observe(seconds)

    # ---------------------------------------------------------------- scrapes

    def render(self) -> bytes:
        """Returns the metrics in the text exposition format."""
        return generate_latest(self._registry)

    def save(self) -> None:
        """Detects restarts and writes the counts for other processes. Called once a second."""
        self._watch_new()
        for engine in self.engines:
            engine.current_stats()
        if self._share is None:
            return
        target = self._share / f"metrics-{self.process}.msgpack"
        unfinished = target.with_suffix(".tmp")
        unfinished.write_bytes(msgspec.msgpack.encode([engine.series for engine in self.engines]))
        unfinished.replace(target)

    def _others(self) -> Iterator[list[Series]]:
        """Yields the series of each other process, by engine."""
        if self._share is None:
            return
        for path in sorted(self._share.glob("metrics-*.msgpack")):
            if path.name != f"metrics-{self.process}.msgpack":
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    yield msgspec.msgpack.decode(path.read_bytes(), type=list[Series])

    def collect(self) -> Iterator[Any]:
        for family in (*self.collect_engines(), *self.collect_requests()):
            if self._log_stats or not family.name.startswith("vllm:"):
                yield family

    def collect_engines(self) -> Iterator[Any]:
        """Yields the metrics from the engines' statistics, and those of the engine processes."""
        self._watch_new()
        yield from collect_engines(self.engines)
        yield from self._collect_processes()

    def collect_requests(self) -> Iterator[Any]:
        """Yields the metrics of requests, tools and the store."""
        self._watch_new()
        for name, samples in self._gauges.items():
            doc, labels = STORE_GAUGES[name]
            family = self._family(GaugeMetricFamily, name, doc, labels)
            for values, number in samples.items():
                family.add_metric([*self._labels.values(), *values], number)
            if samples:
                yield family
        yield from self._collect_series()

    def _collect_series(self) -> Iterator[Any]:
        """Yields the sums over all processes: per engine, except for the server's own metrics."""
        every = [[engine.series for engine in self.engines], *self._others()]
        series = [
            total(process[index] for process in every if index < len(process))
            for index in range(len(self.engines))
        ]
        for name, (doc, labels) in COUNTERS.items():
            family = self._family(CounterMetricFamily, name, doc, labels)
            for own, found in self._by_engine(name, series):
                for values, amount in found.counters.get(name, {} if labels else {(): 0.0}).items():
                    family.add_metric([*own, *values], amount)
            yield family
        for name, (doc, _, labels) in HISTOGRAMS.items():
            family = self._family(HistogramMetricFamily, name, doc, labels)
            for own, found in self._by_engine(name, series):
                for values, histogram in found.histograms.get(name, {}).items():
                    family.add_metric([*own, *values], histogram.cumulative(), histogram.total)
            yield family

    def _family(self, kind: Any, name: str, doc: str, labels: Iterable[str]) -> Any:
        return kind(name, doc, labels=[*([] if is_http(name) else self._labels), *labels])

    def _by_engine(self, name: str, series: list[Series]) -> list[tuple[list[str], Series]]:
        """Returns the label values of each engine that has this metric, with its series."""
        if is_http(name):
            return [([], series[0])]
        pairs = [(list(e.labels.values()), found) for e, found in zip(self.engines, series, strict=True)]
        return pairs[:1] if name in BY_SERVER else pairs

    def _collect_processes(self) -> Iterator[Any]:
        """Yields the process_* metrics of the engine processes, labelled by engine if there are several."""
        merged: dict[str, Any] = {}
        for engine in self.engines:
            own = ProcessCollector(namespace="chorale:engine", pid=engine.pid, registry=None)
            for family in own.collect():
                found = merged.setdefault(family.name, family)
                if len(self.engines) == 1:
                    continue
                label = {"engine": engine.labels["engine"]}
                named = [sample._replace(labels=label) for sample in family.samples]
                found.samples = named if found is family else found.samples + named
        yield from merged.values()
