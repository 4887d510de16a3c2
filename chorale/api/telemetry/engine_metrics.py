"""Metrics from the engines' own statistics: names, descriptions, labels and readers.

Names with the prefix vllm: are vLLM's. Metrics of the host-memory tier (``--kv-offloading-size``) have the
names of vLLM's offloading connector.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from chorale.api.telemetry.engine_record import EngineRecord
from chorale.api.telemetry.metric_names import ACCEPTED_PER_POSITION, ENGINE_LABELS, SLEEP_STATES, Labels
from chorale.client.base import LEFT, EngineInfo
from chorale.client.summary import add_columns
from chorale.engine.histogram import BLOCK_SECONDS, STEP_TOKENS, Histogram
from chorale.engine.types import EngineStats

COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
Values = Mapping[Labels, float]  # label values (without the engine labels) -> sample


class Seen:
    """The state of one engine at a scrape. ``totals``: its counters since the server's start."""

    def __init__(self, record: EngineRecord) -> None:
        self.record = record
        self.stats: EngineStats = record.current_stats()
        self.totals = record.totals(self.stats)
        self.info: Any = record.info  # EngineInfo, or None until the engine has been ready once


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """One metric. ``read``: the path of its value in ``Seen``, or a function that returns its samples.

    ``has``: whether an engine with this info has it. None: every engine, even without info.
    """

    kind: Any
    name: str
    doc: str
    read: str | Callable[[Seen], float | Values | Histogram]
    labels: Labels = ()
    has: Callable[[EngineInfo], bool] | None = None

    def family(self, engines: Sequence[Seen]) -> Any:
        family = self.kind(self.name, self.doc, labels=[*ENGINE_LABELS, *self.labels])
        read = attrgetter(self.read) if isinstance(self.read, str) else self.read
        for seen in engines:
            if self.has is None or (seen.info is not None and self.has(seen.info)):
                found = read(seen)
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


def _histogram(field: str, bounds: tuple[float, ...]) -> Callable[[Seen], Values | Histogram]:
    """Returns the reader of an engine's histogram, which has no samples if the engine does not keep it."""

    def read(seen: Seen) -> Values | Histogram:
        *counts, total = getattr(seen.totals, field) or (None,)
        return {} if total is None else Histogram(bounds, list(map(int, counts)), total)

    return read


def _facts(*fields: str) -> Callable[[Seen], Values]:
    """Returns the reader of an info metric, whose labels are these fields and whose value is 1."""
    return lambda seen: {tuple(str(getattr(seen.info, field)) for field in fields): 1}


def _by_source(seen: Seen) -> Values:
    """Returns prompt tokens by source. Recomputed tokens count as cached and as computed, as in vLLM."""
    cached, of_host = seen.totals.cached_prompt_tokens, seen.totals.host_prompt_tokens
    return {
        ("local_compute",): seen.totals.prompt_tokens - cached,
        ("local_cache_hit",): cached - of_host + seen.totals.recomputed_prompt_tokens,
        ("external_kv_transfer",): of_host,
    }


def _cached(seen: Seen) -> Values:
    found = {"device": seen.totals.prefix_cache_hits, "host": seen.totals.host_cache_hits}
    return {(source,): found.get(source, 0) for source in CACHE_SOURCES}


def _waiting(seen: Seen) -> Values:
    deferred = seen.stats.num_deferred
    return {("capacity",): seen.stats.num_waiting - deferred, ("deferred",): deferred}


def _accepted(seen: Seen) -> Values:
    """Returns a number for each position of the longest possible draft."""
    positions = (0,) * seen.info.num_speculative_tokens
    counts = add_columns([seen.totals.accepted_per_position, positions])
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
    EngineMetric(GAUGE, "vllm:num_requests_running", "Sequences in the running batch", "stats.num_running"),
    EngineMetric(GAUGE, "vllm:num_requests_waiting", "Waiting sequences", "stats.num_waiting"),
    EngineMetric(GAUGE, "vllm:num_requests_waiting_by_reason",
                 "Sequences waiting for capacity, or deferred until a grammar or a shared prompt is ready",
                 _waiting, ("reason",)),
    EngineMetric(GAUGE, "vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1",
                 lambda seen: seen.stats.kv_blocks_used / max(seen.stats.kv_blocks_total, 1)),
    EngineMetric(GAUGE, "vllm:lora_requests_info", "Adapters of requests; value: the time",
                 _adapters, ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
                 lambda info: info.max_loras > 0),
    EngineMetric(COUNTER, "vllm:prompt_tokens",
                 "Prompt tokens, including cached ones", "totals.prompt_tokens"),
    EngineMetric(COUNTER, "vllm:prompt_tokens_recomputed",
                 "Cached prompt tokens that were recomputed because the last token's logits are needed",
                 "totals.recomputed_prompt_tokens"),
    EngineMetric(COUNTER, "vllm:generation_tokens", "Tokens sampled", "totals.generation_tokens"),
    EngineMetric(COUNTER, "vllm:prefix_cache_queries",
                 "Tokens looked up in the prefix cache", "totals.prefix_cache_queries"),
    EngineMetric(COUNTER, "vllm:prefix_cache_hits",
                 "Tokens found in the prefix cache", "totals.prefix_cache_hits"),
    EngineMetric(COUNTER, "vllm:num_preemptions",
                 "Sequences that were preempted and recomputed", "totals.num_preemptions"),
    EngineMetric(COUNTER, "vllm:corrupted_requests",
                 "Sequences that were ended because their logits were not finite", "totals.num_corrupted"),
    EngineMetric(COUNTER, "chorale:engine_steps", "Engine steps", "totals.num_steps"),
    EngineMetric(COUNTER, "chorale:kv_event_batches",
                 "Batches of KV events, including dropped ones", "totals.kv_event_batches"),
    EngineMetric(COUNTER, "chorale:kv_event_batches_dropped",
                 "Batches of KV events that were dropped because too many were waiting to be sent",
                 "totals.kv_event_batches_dropped"),
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
    EngineMetric(COUNTER, "vllm:spec_decode_num_drafts",
                 "Drafts that steps verified", "totals.num_drafts", (), _drafts),
    EngineMetric(COUNTER, "vllm:spec_decode_num_draft_tokens",
                 "Tokens of the verified drafts", "totals.num_draft_tokens", (), _drafts),
    EngineMetric(COUNTER, "vllm:spec_decode_num_accepted_tokens",
                 "Draft tokens accepted: they and all before them equal the sampled tokens",
                 "totals.num_accepted_tokens", (), _drafts),
    EngineMetric(GAUGE, "chorale:speculation_info", "Draft method (always 1)",
                 _speculation, ("drafts", "synthetic"), _drafts),
    EngineMetric(COUNTER, ACCEPTED_PER_POSITION,
                 "Draft tokens that were accepted, by their position in the draft",
                 _accepted, ("position",), _drafts),
    EngineMetric(COUNTER, "vllm:external_prefix_cache_queries",
                 "Prompt tokens looked up in host memory because the device's prefix cache lacked them",
                 "totals.host_cache_queries", (), _host),
    EngineMetric(COUNTER, "vllm:external_prefix_cache_hits",
                 "Prompt tokens found in host memory", "totals.host_cache_hits", (), _host),
    EngineMetric(COUNTER, "vllm:kv_offload_store_bytes",
                 "Bytes of KV pages copied to host memory", "totals.host_bytes_saved", (), _host),
    EngineMetric(COUNTER, "vllm:kv_offload_load_bytes",
                 "Bytes of KV pages copied back to the device", "totals.host_bytes_loaded", (), _host),
    EngineMetric(COUNTER, "vllm:kv_offload_load_time",
                 "Seconds from the start of each load until the scheduler saw its end",
                 "totals.host_load_seconds", (), _host),
    EngineMetric(COUNTER, "vllm:kv_offload_stores_skipped",
                 "KV pages evicted from the device without a copy because too many were evicted at once",
                 "totals.host_pages_dropped", (), _host),
    EngineMetric(COUNTER, "chorale:host_kv_loads",
                 "Loads from host memory", "totals.num_host_loads", (), _host),
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
                 "record.num_restarts"),
    EngineMetric(GAUGE, "vllm:cache_config_info", "Configuration of the KV cache",
                 _facts("block_size", "num_blocks", "enable_prefix_caching", "kv_cache_dtype"),
                 ("block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype"), _known),
    EngineMetric(GAUGE, "chorale:engine_info", "Device, number formats, ops and ranks (always 1)",
                 _facts(*_COMPUTES), _COMPUTES, _known),
    EngineMetric(GAUGE, "chorale:ranks", "Processes that share the model (tensor parallelism)",
                 "info.tensor_parallel_size", (), _known),
    EngineMetric(GAUGE, "chorale:rank_memory_bytes", "Memory that each rank uses, by kind",
                 _rank_bytes, ("kind", "rank"), _known),
    EngineMetric(GAUGE, "chorale:rank_free_memory_bytes",
                 "Free memory of each rank's device before loading", _rank_free, ("rank",), _known),
    EngineMetric(GAUGE, "chorale:rank_exchange_info", "How ranks sum their results, and over which links",
                 _facts("exchange", "rank_links"), ("exchange", "links"), lambda info: bool(info.exchange)),
)
# fmt: on
