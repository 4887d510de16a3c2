"""Metrics from the engines' own statistics: names, descriptions, labels and readers.

Names with the prefix vllm: are vLLM's. Metrics of the host-memory tier (``--kv-offloading-size``) have the
names of vLLM's offloading connector.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from chorale.api.telemetry.engine_record import EngineRecord
from chorale.api.telemetry.metric_names import (
    ACCEPTED_PER_POSITION,
    DRAFT_COUNTERS,
    ENGINE_COUNTERS,
    HOST_COUNTERS,
    SLEEP_STATES,
)
from chorale.api.telemetry.metric_types import ENGINE_LABELS, Labels
from chorale.client.base import LEFT, EngineInfo
from chorale.engine.histogram import BLOCK_SECONDS, STEP_TOKENS, Histogram
from chorale.engine.types import EngineStats

COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
Values = Mapping[Labels, float]  # label values (without the engine labels) -> sample


class Seen:
    """The state of one engine at a scrape. ``totals``: its counters since the server's start, by field."""

    def __init__(self, record: EngineRecord) -> None:
        self.record = record
        self.stats: EngineStats = record.current_stats()
        self.totals = record.totals(self.stats)
        self.info: Any = record.info  # EngineInfo, or None until the engine has been ready once


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """One metric. ``has``: whether an engine with this info has it. None: every engine, even without info."""

    kind: Any
    name: str
    doc: str
    read: Callable[[Seen], float | Values | Histogram]
    labels: Labels = ()
    has: Callable[[EngineInfo], bool] | None = None

    def family(self, engines: Sequence[Seen]) -> Any:
        family = self.kind(self.name, self.doc, labels=[*ENGINE_LABELS, *self.labels])
        for seen in engines:
            if self.has is None or (seen.info is not None and self.has(seen.info)):
                found = self.read(seen)
                if isinstance(found, Histogram):
                    family.add_metric([*seen.record.labels.values()], found.cumulative(), found.total)
                    continue
                for values, number in (found if isinstance(found, Mapping) else {(): found}).items():
                    family.add_metric([*seen.record.labels.values(), *values], number)
        return family


def collect_engines(records: Sequence[EngineRecord]) -> Iterator[Any]:
    """Yields the metric families that have samples."""
    engines = list(map(Seen, records))
    families = (metric.family(engines) for metric in ENGINE_METRICS)
    yield from (family for family in families if family.samples)


def _drafts(info: EngineInfo) -> bool:
    return info.num_speculative_tokens > 0


def _host(info: EngineInfo) -> bool:
    return info.num_host_pages > 0


def _known(info: EngineInfo) -> bool:
    return True


def _totals(counters: Mapping[str, tuple[str, str]], has: Any = None) -> Iterator[EngineMetric]:
    for name, (field, doc) in counters.items():
        yield EngineMetric(COUNTER, name, doc, _total(field), (), has)


def _total(field: str) -> Callable[[Seen], float]:
    return lambda seen: seen.totals[field]


def _histogram(field: str, bounds: tuple[float, ...]) -> Callable[[Seen], Values | Histogram]:
    """Returns the reader of an engine's histogram, which has no samples if the engine does not keep it."""

    def read(seen: Seen) -> Values | Histogram:
        *counts, total = seen.record.columns(field, seen.stats) or (None,)
        return {} if total is None else Histogram(bounds, list(map(int, counts)), total)

    return read


def _facts(*fields: str) -> Callable[[Seen], Values]:
    """Returns the reader of an info metric, whose labels are these fields and whose value is 1."""
    return lambda seen: {tuple(str(getattr(seen.info, field)) for field in fields): 1}


def _by_source(seen: Seen) -> Values:
    """Returns prompt tokens by source. Recomputed tokens count as cached and as computed, as in vLLM."""
    cached, of_host = seen.totals["cached_prompt_tokens"], seen.totals["host_prompt_tokens"]
    return {
        ("local_compute",): seen.totals["prompt_tokens"] - cached,
        ("local_cache_hit",): cached - of_host + seen.totals["recomputed_prompt_tokens"],
        ("external_kv_transfer",): of_host,
    }


def _cached(seen: Seen) -> Values:
    found = {"device": seen.totals["prefix_cache_hits"], "host": seen.totals["host_cache_hits"]}
    return {(source,): found.get(source, 0) for source in CACHE_SOURCES}


def _waiting(seen: Seen) -> Values:
    deferred = seen.stats.num_deferred
    return {("capacity",): seen.stats.num_waiting - deferred, ("deferred",): deferred}


def _accepted(seen: Seen) -> Values:
    counts = seen.record.accepted_per_position(seen.stats)
    return {(str(position),): count for position, count in enumerate(counts)}


def _speculation(seen: Seen) -> Values:
    """Returns 1, labelled by draft method and by whether acceptance (and so the output) is synthetic."""
    return {(seen.info.speculation, str(seen.info.synthetic_acceptance).lower()): 1}


def _rank_bytes(seen: Seen) -> Values:
    kinds = seen.info.rank_bytes.items()
    return {(kind, str(rank)): size for kind, sizes in kinds for rank, size in enumerate(sizes)}


def _rank_free(seen: Seen) -> Values:
    return {(str(rank),): size for rank, size in enumerate(seen.info.rank_free_bytes)}


def _sleep(seen: Seen) -> Values:
    """Level 0 is none of vLLM's states."""
    numbers = {"awake": 0, "weights_offloaded": 2, "discard_all": 3}
    return {(state,): seen.stats.sleep_state == numbers[state] for state in SLEEP_STATES}


def _up(seen: Seen) -> Values:
    """Returns nothing for a place in a fleet that an engine has left."""
    status = seen.record.status
    return {} if status == LEFT else {(): status.state in ("ready", "draining")}


def _adapters(seen: Seen) -> Values:
    """Returns the time, with the names of the adapters as labels, as in vLLM."""
    stats, info = seen.stats, seen.info
    most = str(info.max_loras if info is not None else 0)
    return {(most, ",".join(stats.waiting_adapters), ",".join(stats.running_adapters)): time.time()}


CACHE_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")  # vLLM's; only two occur here
_COMPUTES = ("device", "dtype", "kv_cache_dtype", "ops", "tensor_parallel_size")
# fmt: off
ENGINE_METRICS: tuple[EngineMetric, ...] = (
    EngineMetric(GAUGE, "vllm:num_requests_running", "Sequences in the running batch",
                 lambda seen: seen.stats.num_running),
    EngineMetric(GAUGE, "vllm:num_requests_waiting", "Waiting sequences",
                 lambda seen: seen.stats.num_waiting),
    EngineMetric(GAUGE, "vllm:num_requests_waiting_by_reason",
                 "Sequences waiting for capacity, or deferred until a grammar or a shared prompt is ready",
                 _waiting, ("reason",)),
    EngineMetric(GAUGE, "vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1",
                 lambda seen: seen.stats.kv_blocks_used / max(seen.stats.kv_blocks_total, 1)),
    EngineMetric(GAUGE, "vllm:lora_requests_info", "Adapters of requests; value: the time",
                 _adapters, ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
                 lambda info: info.max_loras > 0),
    *_totals(ENGINE_COUNTERS),
    EngineMetric(COUNTER, "vllm:prompt_tokens_by_source", "Prompt tokens by source", _by_source, ("source",)),
    EngineMetric(COUNTER, "vllm:prompt_tokens_cached_by_source", "Tokens found in the prefix cache, by where",
                 _cached, ("source",)),
    EngineMetric(HISTOGRAM, "vllm:iteration_tokens_total",
                 "Prompt tokens computed and tokens sampled in one engine step",
                 _histogram("step_tokens", STEP_TOKENS)),
    EngineMetric(HISTOGRAM, "vllm:kv_block_lifetime_seconds", "Seconds between allocations of a KV block",
                 _histogram("block_lifetimes", BLOCK_SECONDS)),
    EngineMetric(HISTOGRAM, "vllm:kv_block_idle_before_evict_seconds",
                 "Seconds from the last access to a KV block to its next allocation",
                 _histogram("block_idle", BLOCK_SECONDS)),
    EngineMetric(HISTOGRAM, "vllm:kv_block_reuse_gap_seconds",
                 "Seconds between prefix hits on a KV block, the last four of its life",
                 _histogram("block_gaps", BLOCK_SECONDS)),
    *_totals(DRAFT_COUNTERS, _drafts),
    EngineMetric(GAUGE, "chorale:speculation_info", "Draft method (always 1)",
                 _speculation, ("drafts", "synthetic"), _drafts),
    EngineMetric(COUNTER, ACCEPTED_PER_POSITION,
                 "Draft tokens that were accepted, by their position in the draft",
                 _accepted, ("position",), _drafts),
    *_totals(HOST_COUNTERS, _host),
    EngineMetric(GAUGE, "vllm:kv_offload_cpu_cache_usage_perc",
                 "Share of the KV pages in host memory that are in use, 0 to 1",
                 lambda seen: seen.stats.host_pages_used / max(seen.stats.host_pages_total, 1), (), _host),
    EngineMetric(GAUGE, "chorale:host_kv_pages", "KV pages in host memory",
                 lambda seen: {("used",): seen.stats.host_pages_used,
                               ("total",): seen.stats.host_pages_total}, ("kind",), _host),
    EngineMetric(GAUGE, "vllm:engine_sleep_state", "Sleep state of the engine",
                 _sleep, ("sleep_state",)),
    EngineMetric(GAUGE, "chorale:engine_up",
                 "1: the engine answers requests; 0: it loads, starts again, or has failed for good", _up),
    EngineMetric(COUNTER, "chorale:engine_restarts",
                 "Restarts of the engine process, also those that failed",
                 lambda seen: seen.record.num_restarts),
    EngineMetric(GAUGE, "vllm:cache_config_info", "Configuration of the KV cache",
                 _facts("block_size", "num_blocks", "enable_prefix_caching", "kv_cache_dtype"),
                 ("block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype"), _known),
    EngineMetric(GAUGE, "chorale:engine_info", "Device, number formats, ops and ranks (always 1)",
                 _facts(*_COMPUTES), _COMPUTES, _known),
    EngineMetric(GAUGE, "chorale:ranks", "Processes that share the model (tensor parallelism)",
                 lambda seen: seen.info.tensor_parallel_size, (), _known),
    EngineMetric(GAUGE, "chorale:rank_memory_bytes", "Memory that each rank uses, by kind",
                 _rank_bytes, ("kind", "rank"), _known),
    EngineMetric(GAUGE, "chorale:rank_free_memory_bytes",
                 "Free memory of each rank's device before loading", _rank_free, ("rank",), _known),
    EngineMetric(GAUGE, "chorale:rank_exchange_info", "How ranks sum their results, and over which links",
                 _facts("exchange", "rank_links"), ("exchange", "links"), lambda info: bool(info.exchange)),
)
# fmt: on
