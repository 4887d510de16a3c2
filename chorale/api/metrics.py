"""/metrics: vLLM's metric names (so that its dashboards work unchanged), and ours under ``chorale:``.

``Metrics`` is written by the metered client (every token passes it, so no endpoint can forget to count),
by the HTTP observer, and by endpoints for what only they see (``repaired``). It is read by a scrape.

With several API processes on one port a scrape reaches any of them. Each then writes what it has counted
to a file in ``share`` once a second, and a scrape answers with its own live numbers plus the others' files:
the sums are those of the whole server, at most a second old. Engine numbers come from the engine's own
statistics, which every process receives whole; they are not summed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from chorale.api.tally import Histogram, Labels, Series, total
from chorale.client.base import EngineClient
from chorale.engine.types import EngineStats
from chorale.errors import ChoraleError

if TYPE_CHECKING:
    from chorale.api.responses.stored import StoreStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
_PER_TOKEN = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
_LENGTHS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))[
    :-1
]  # 1, 2, 5, ... 200000
_STEP = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_HTTP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...], Labels]] = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token", _FIRST, ()),
    "vllm:inter_token_latency_seconds": ("Between tokens of one choice", _PER_TOKEN, ()),
    "vllm:request_time_per_output_token_seconds": ("Mean per token after the first", _PER_TOKEN, ()),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end", _LATENCY, ()),
    "vllm:request_queue_time_seconds": ("From arrival to the first step", _LATENCY, ()),
    "vllm:request_prefill_time_seconds": ("From the first step to the first token", _LATENCY, ()),
    "vllm:request_decode_time_seconds": ("From the first token to the last", _LATENCY, ()),
    "vllm:request_inference_time_seconds": ("From the first step to the last token", _LATENCY, ()),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request", _LENGTHS, ()),
    "vllm:request_generation_tokens": ("Output tokens of a choice", _LENGTHS, ()),
    "vllm:request_max_num_generation_tokens": ("Output tokens of a request's longest choice", _LENGTHS, ()),
    "vllm:request_params_n": ("Choices asked for", (1.0, 2.0, 5.0, 10.0, 20.0), ()),
    "vllm:request_params_max_tokens": ("Limit asked for", _LENGTHS, ()),
    "vllm:iteration_tokens_total": ("Tokens computed in one engine step", _STEP, ()),
    "http_request_duration_seconds": ("Until the last byte was sent", _HTTP, ("handler", "method")),
}

COUNTERS: dict[str, tuple[str, Labels]] = {
    "vllm:prompt_tokens_cached": ("Prompt tokens served from the prefix cache", ()),
    "vllm:request_success": ("Choices that ended", ("finished_reason",)),
    "chorale:queue_rejections": ("Requests refused because the queue was full", ()),
    "chorale:aborts": ("Choices that were cut short", ("reason",)),
    "chorale:tool_calls": ("Calls of tools that run here", ("tool", "status")),
    "chorale:harmony_repairs": ("Malformed harmony that was read as best it could be", ("kind",)),
    "chorale:response_store_failures": ("Responses that could not be stored", ()),
    "http_requests": ("HTTP requests", ("handler", "method", "status")),
}
# Those that do not carry the labels of the engine.
_HTTP_NAMES = frozenset({"http_requests", "http_request_duration_seconds"})

_ENGINE_COUNTERS: dict[str, tuple[str, str]] = {
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens, cached ones included"),
    "vllm:generation_tokens": ("generation_tokens", "Tokens sampled"),
    "vllm:prefix_cache_queries": ("prefix_cache_queries", "Tokens asked of the prefix cache"),
    "vllm:prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the prefix cache"),
    "vllm:num_preemptions": ("num_preemptions", "Sequences that lost their pages and were recomputed"),
    "chorale:engine_steps": ("num_steps", "Engine steps"),
}


class Metrics(Collector):
    """One per API process. ``watch`` is called once, by ``create_app``."""

    def __init__(
        self, model_name: str = "", engine: str = "0", *, process: int = 0, share: Path | None = None
    ) -> None:
        self.series = Series()
        self._labels: dict[str, str] = {"model_name": model_name, "engine": engine}
        self._client: EngineClient | None = None
        self._last_stats = EngineStats()
        self._before_restarts: dict[str, int] = {field: 0 for field, _ in _ENGINE_COUNTERS.values()}
        self._num_restarts = 0
        self._engine_id = ""
        self._store_sizes: dict[str, int] = {}  # what the response store holds, by metric
        self._process, self._share = process, share
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.histograms = {
            name: self.series.histogram(name, bounds)
            for name, (_, bounds, labels) in HISTOGRAMS.items()
            if not labels
        }
        self._step_tokens = self.histograms["vllm:iteration_tokens_total"]

    # ---------------------------------------------------------------- written by others

    def watch(self, client: EngineClient) -> None:
        self._client = client

    def tool_called(self, tool: str, failed: bool) -> None:
        """``tool``: browser, python or mcp."""
        self.series.count("chorale:tool_calls", (tool, "failed" if failed else "completed"))

    def repaired(self, repairs: Mapping[str, int]) -> None:
        """``TurnEnded.repairs``. Kinds come from the parser's closed set, never from the model's text."""
        for kind, number in repairs.items():
            self.series.count("chorale:harmony_repairs", (kind,), number)

    def stored(self, stats: StoreStats) -> None:
        """What the response store holds. Several processes share it: it is not summed."""
        self._store_sizes = {
            "chorale:response_store_responses": stats.num_responses,
            "chorale:response_store_conversations": stats.num_conversations,
            "chorale:response_store_bytes": stats.num_bytes,
            "chorale:background_responses": stats.num_live,
        }

    def http_finished(self, handler: str, method: str, status: int, seconds: float) -> None:
        """``handler`` is the matched route's path template, so the number of labels is bounded."""
        self.series.count("http_requests", (handler, method, f"{status // 100}xx"))
        _, bounds, _ = HISTOGRAMS["http_request_duration_seconds"]
        self.series.histogram("http_request_duration_seconds", bounds, (handler, method)).observe(seconds)

    def engine_stats(self, stats: EngineStats) -> None:
        """Look at the engine's counters; one comparison unless a step has passed since the last look."""
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
        """The text exposition format."""
        return generate_latest(self._registry)

    def save(self) -> None:
        """Write this process's part for the others. Nothing to do unless ``share`` was given."""
        if self._share is None:
            return
        target = self._share / f"metrics-{self._process}.msgpack"
        unfinished = target.with_suffix(".tmp")
        unfinished.write_bytes(msgspec.msgpack.encode(_portable(self.series)))
        unfinished.replace(target)

    def _others(self) -> Iterator[Series]:
        if self._share is None:
            return
        for path in sorted(self._share.glob("metrics-*.msgpack")):
            if path.name != f"metrics-{self._process}.msgpack":
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    yield _from_portable(path.read_bytes())

    def collect(self) -> Iterator[Any]:
        yield from self._collect_engine()
        for name, value in self._store_sizes.items():
            yield self._gauge(name, "What the response store holds", value)
        series = total([self.series, *self._others()])
        for name, (doc, labels) in COUNTERS.items():
            own = {} if name in _HTTP_NAMES else self._labels
            counter = CounterMetricFamily(name, doc, labels=[*own, *labels])
            for values, amount in series.counters.get(name, {} if labels else {(): 0.0}).items():
                counter.add_metric([*own.values(), *values], amount)
            yield counter
        for name, (doc, _, labels) in HISTOGRAMS.items():
            own = {} if name in _HTTP_NAMES else self._labels
            family = HistogramMetricFamily(name, doc, labels=[*own, *labels])
            for values, histogram in series.histograms.get(name, {}).items():
                family.add_metric([*own.values(), *values], histogram.cumulative(), histogram.total)
            yield family

    def _collect_engine(self) -> Iterator[Any]:
        stats = self._current_stats()
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences in the running batch", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV pages in use; 1 is all", used)
        for name, (field, doc) in _ENGINE_COUNTERS.items():
            value = self._before_restarts[field] + getattr(stats, field)
            yield self._counter(name, doc, value)
        yield self._counter(
            "chorale:engine_restarts", "Engine processes that replaced another", self._num_restarts
        )
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
                "cache_dtype": info.dtype,
            }
            family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache", labels=list(labels))
            family.add_metric(list(labels.values()), 1.0)
            yield family

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
    """msgpack maps have no tuple keys here: label values become lists of pairs."""
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
