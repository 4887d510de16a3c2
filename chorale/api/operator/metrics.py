"""/metrics: vLLM's metric names, so that its dashboards work unchanged, and own metrics under ``chorale:``.

``metric_names`` has the names and descriptions. ``Metrics`` is written by the metered client, which sees
every token, by the HTTP middleware, and by endpoints for what only they know (``repaired``).

With several API processes on one port, a scrape reaches any of them. Each process writes its counts to a file
in ``share`` once a second, and a scrape adds the other processes' files to its own counts, so the sums are at
most a second old. Engine metrics come from the engine's statistics, which every process receives in full;
they are not summed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from chorale.api.operator.metric_names import (
    COUNTERS,
    ENGINE_COUNTERS,
    ENGINE_FIELDS,
    HISTOGRAMS,
    SLEEP_STATES,
    is_http,
)
from chorale.api.operator.metric_types import Histogram, Labels, Series, total
from chorale.client.base import EngineClient
from chorale.engine.types import EngineStats
from chorale.errors import ChoraleError

if TYPE_CHECKING:
    from chorale.store.protocol import StoreStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """The metrics of one API process. ``create_app`` calls ``watch`` once.

    ``log_stats`` False leaves out the vllm: metrics, as in vLLM with --disable-log-stats.
    """

    def __init__(
        self,
        model_name: str = "",
        engine: str = "0",
        *,
        process: int = 0,
        share: Path | None = None,
        log_stats: bool = True,
    ) -> None:
        self.series = Series()
        self._labels: dict[str, str] = {"model_name": model_name, "engine": engine}
        self._client: EngineClient | None = None
        self._last_stats = EngineStats()
        self._before_restarts = dict.fromkeys(ENGINE_FIELDS, 0)
        self._num_restarts = 0
        self._engine_id = ""
        self._store_works = True
        self._store_sizes: dict[str, int] = {}  # contents of the response store, by metric
        self.process, self._share, self._log_stats = process, share, log_stats
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._register_process()
        self.histograms = {
            name: self.series.histogram(name, bounds)
            for name, (_, bounds, labels) in HISTOGRAMS.items()
            if not labels
        }
        self._step_tokens = self.histograms["vllm:iteration_tokens_total"]
        self._all_http = self.histograms["http_request_duration_highr_seconds"]

    def _register_process(self) -> None:
        """Registers the process_* and python_* metrics of this process, and process_* of the engine's.

        With several API processes, each scrape would show another process, so they are left out, as in vLLM.
        """
        if self._share is None:
            ProcessCollector(registry=self._registry)
            PlatformCollector(registry=self._registry)
            GCCollector(registry=self._registry)
        ProcessCollector(namespace="chorale:engine", pid=self._engine_pid, registry=self._registry)

    def _engine_pid(self) -> int:
        """Returns the engine's process id, or an invalid one if there is no separate engine process."""
        with contextlib.suppress(ChoraleError):
            if self._client is not None and self._client.info.pid:
                return self._client.info.pid
        return -1

    # ---------------------------------------------------------------- written by others

    def watch(self, client: EngineClient) -> None:
        self._client = client

    def tool_called(self, tool: str, failed: bool) -> None:
        """Counts a call. ``tool``: browser, python or mcp."""
        self.series.count("chorale:tool_calls", (tool, "failed" if failed else "completed"))

    def repaired(self, repairs: Mapping[str, int]) -> None:
        """Counts ``TurnEnded.repairs``. The kinds are a fixed set of the parser, never text of the model."""
        for kind, number in repairs.items():
            self.series.count("chorale:harmony_repairs", (kind,), number)

    def store_works(self, works: bool) -> None:
        """Records whether the last write to the response store succeeded."""
        self._store_works = works

    def stored(self, stats: StoreStats) -> None:
        """Records the contents of the response store, which all processes share: it is not summed."""
        self._store_sizes = {
            "chorale:response_store_responses": stats.num_responses,
            "chorale:response_store_conversations": stats.num_conversations,
            "chorale:response_store_bytes": stats.num_bytes,
            "chorale:background_responses": stats.num_live,
        }

    def http_finished(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Counts a request.

        ``handler``: the matched route's path template, which bounds the number of labels.
        """
        self.series.count("http_requests", (handler, method, f"{status // 100}xx"))
        _, bounds, _ = HISTOGRAMS["http_request_duration_seconds"]
        self.series.histogram("http_request_duration_seconds", bounds, (handler, method)).observe(seconds)
        self._all_http.observe(seconds)

    def engine_stats(self, stats: EngineStats) -> None:
        """Updates from the engine's counters. Returns at once if there was no step since the last call."""
        last = self._last_stats
        if stats.num_steps == last.num_steps:
            return
        if stats.num_steps < last.num_steps:  # a new engine process counts from zero
            for field in self._before_restarts:
                self._before_restarts[field] += getattr(last, field)
        self._last_stats = stats
        self._step_tokens.observe(stats.last_step_tokens)

    # ---------------------------------------------------------------- read by a scrape

    def render(self) -> bytes:
        """Returns the metrics in the text exposition format."""
        return generate_latest(self._registry)

    def save(self) -> None:
        """Writes this process's counts for the other processes, if ``share`` is set."""
        if self._share is None:
            return
        target = self._share / f"metrics-{self.process}.msgpack"
        unfinished = target.with_suffix(".tmp")
        unfinished.write_bytes(msgspec.msgpack.encode(_portable(self.series)))
        unfinished.replace(target)

    def _others(self) -> Iterator[Series]:
        if self._share is None:
            return
        for path in sorted(self._share.glob("metrics-*.msgpack")):
            if path.name != f"metrics-{self.process}.msgpack":
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    yield _from_portable(path.read_bytes())

    def collect(self) -> Iterator[Any]:
        for family in self._collect():
            if self._log_stats or not family.name.startswith("vllm:"):
                yield family

    def _collect(self) -> Iterator[Any]:
        yield from self._collect_engine()
        yield self._gauge(
            "chorale:response_store_up",
            "1 if the last write to the response store succeeded, 0 if responses cannot be stored",
            int(self._store_works),
        )
        for name, value in self._store_sizes.items():
            yield self._gauge(name, "Contents of the response store", value)
        series = total([self.series, *self._others()])
        for name, (doc, labels) in COUNTERS.items():
            own = {} if is_http(name) else self._labels
            counter = CounterMetricFamily(name, doc, labels=[*own, *labels])
            for values, amount in series.counters.get(name, {} if labels else {(): 0.0}).items():
                counter.add_metric([*own.values(), *values], amount)
            yield counter
        for name, (doc, _, labels) in HISTOGRAMS.items():
            own = {} if is_http(name) else self._labels
            family = HistogramMetricFamily(name, doc, labels=[*own, *labels])
            for values, histogram in series.histograms.get(name, {}).items():
                family.add_metric([*own.values(), *values], histogram.cumulative(), histogram.total)
            yield family

    def _collect_engine(self) -> Iterator[Any]:
        stats = self._current_stats()
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences in the running batch", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Waiting sequences", stats.num_waiting)
        reasons = {"capacity": stats.num_waiting - stats.num_deferred, "deferred": stats.num_deferred}
        yield self._gauges(
            "vllm:num_requests_waiting_by_reason",
            "Waiting sequences: for room (capacity), or for a grammar or a shared prompt (deferred)",
            "reason",
            reasons,
        )
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1", used)
        since = {field: self._before_restarts[field] + getattr(stats, field) for field in ENGINE_FIELDS}
        for name, (field, doc) in ENGINE_COUNTERS.items():
            yield self._counter(name, doc, since[field])
        yield self._prompt_tokens_by_source(since)
        states = dict.fromkeys(SLEEP_STATES, 0) | {"awake": 1}
        yield self._gauges(
            "vllm:engine_sleep_state", "Sleep state of the engine (always awake)", "sleep_state", states
        )
        yield self._counter("chorale:engine_restarts", "Restarts of the engine process", self._num_restarts)
        yield from self._collect_info()

    def _current_stats(self) -> EngineStats:
        if self._client is None:
            return self._last_stats
        with contextlib.suppress(ChoraleError):
            engine_id = self._client.info.engine_id
            if self._engine_id and engine_id != self._engine_id:
                self._num_restarts += 1
            self._engine_id = engine_id
        stats = self._client.stats
        self.engine_stats(stats)
        return stats

    def _collect_info(self) -> Iterator[Any]:
        if self._client is None:
            return
        with contextlib.suppress(ChoraleError):
            info = self._client.info
            labels = {
                **self._labels,
                "block_size": str(info.block_size),
                "num_gpu_blocks": str(info.num_blocks),
                "enable_prefix_caching": str(info.enable_prefix_caching),
                "cache_dtype": info.kv_cache_dtype,
            }
            family = GaugeMetricFamily(
                "vllm:cache_config_info", "Configuration of the KV cache", labels=list(labels)
            )
            family.add_metric(list(labels.values()), 1.0)
            yield family

    def _prompt_tokens_by_source(self, since: Mapping[str, int]) -> Any:
        """Yields prompt tokens by source. Recomputed tokens count as cached and as computed, as in vLLM."""
        cached = since["cached_prompt_tokens"]
        sources = {
            "local_compute": since["prompt_tokens"] - cached,
            "local_cache_hit": cached + since["recomputed_prompt_tokens"],
            "external_kv_transfer": 0,
        }
        name = "vllm:prompt_tokens_by_source"
        labels = [*self._labels, "source"]
        family = CounterMetricFamily(name, "Prompt tokens by source", labels=labels)
        for source, number in sources.items():
            family.add_metric([*self._labels.values(), source], number)
        return family

    def _gauges(self, name: str, doc: str, label: str, values: Mapping[str, float]) -> Any:
        family = GaugeMetricFamily(name, doc, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family

    def _gauge(self, name: str, doc: str, value: float) -> Any:
        family = GaugeMetricFamily(name, doc, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, doc: str, value: float) -> Any:
        family = CounterMetricFamily(name, doc, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


_Counts = dict[str, list[tuple[Labels, float]]]
_Histograms = dict[str, list[tuple[Labels, Histogram]]]


def _portable(series: Series) -> Any:
    """Converts tuple keys, which msgpack does not support, to lists of pairs."""
    return (
        {name: list(found.items()) for name, found in series.counters.items()},
        {name: list(found.items()) for name, found in series.histograms.items()},
    )


def _from_portable(data: bytes) -> Series:
    counters, histograms = msgspec.msgpack.decode(data, type=tuple[_Counts, _Histograms])
    return Series(
        {name: dict(found) for name, found in counters.items()},
        {name: dict(found) for name, found in histograms.items()},
    )
