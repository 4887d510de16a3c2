"""The metrics of ``LLM``: the server's, in the classes of vLLM's ``get_metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chorale.api.telemetry.metered_client import observe_timings
from chorale.api.telemetry.metric_names import ACCEPTED_PER_POSITION
from chorale.api.telemetry.metrics import Metrics
from chorale.turns.events import TurnEnded
from chorale.turns.request import TurnRequest


@dataclass
class Metric:
    """A metric and its labels. ``name`` is Prometheus's, without ``_total``."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: int


@dataclass
class Vector(Metric):
    """The counts of accepted draft tokens, by their position in the draft."""

    values: list[int]


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Histogram(Metric):
    """``buckets``: upper bound -> number of observations up to it; "+Inf" has all of them."""

    count: int
    sum: float
    buckets: dict[str, int]


class LlmMetrics(Metrics):
    """Counts the requests of an ``LLM``, in the series of engine 0."""

    def choice_ended(self, turn: TurnRequest, index: int, ended: TurnEnded) -> None:
        record, timings, made = self.engines[0], ended.timings, len(ended.output_token_ids)
        observe, prompt = record.histograms, len(turn.prompt_token_ids)
        reason = "stop" if ended.reason == "tool_calls" else ended.reason
        record.series.count("vllm:request_success", (reason,))
        observe["vllm:request_generation_tokens"].observe(made)
        if timings is not None and timings.first_scheduled:
            observe_timings(timings, record)
            observe["vllm:time_to_first_token_seconds"].observe(timings.first_token - timings.arrival)
            observe["vllm:e2e_request_latency_seconds"].observe(timings.last_token - timings.arrival)
            if made > 1:
                seconds = (timings.last_token - timings.first_token) / (made - 1)
                observe["vllm:request_time_per_output_token_seconds"].observe(seconds)
        if index == 0:  # choices share a prompt, which is counted once
            cached = ended.usage.cached_tokens - ended.usage.later_cached_tokens
            record.series.count("vllm:prompt_tokens_cached", (), cached)
            observe["vllm:request_prompt_tokens"].observe(prompt)
            observe["vllm:request_prefill_kv_computed_tokens"].observe(prompt - cached)
            observe["vllm:request_params_n"].observe(turn.sampling.n)
            observe["vllm:request_params_max_tokens"].observe(turn.sampling.max_tokens or 0)

    def read(self) -> list[Metric]:
        """Return the metrics that are vLLM's."""
        families = (each for each in self.collect() if each.name.startswith("vllm:"))
        unmeasured = "vllm:inter_token_latency_seconds"  # ``LLM`` does not look at single tokens
        return [metric for each in families if each.name != unmeasured for metric in _of_family(each)]


def _of_family(family: Any) -> Iterator[Metric]:
    """Yield a metric for each set of labels."""
    series: dict[tuple[tuple[str, str], ...], list[Any]] = {}
    for sample in family.samples:
        own = (item for item in sample.labels.items() if item[0] not in ("le", "position"))
        series.setdefault(tuple(own), []).append(sample)
    for key, samples in series.items():
        name, labels, values = family.name, dict(key), [sample.value for sample in samples]
        if family.type == "histogram":
            buckets = {each.labels["le"]: int(each.value) for each in samples if "le" in each.labels}
            total = next(each.value for each in samples if each.name.endswith("_sum"))
            yield Histogram(name, labels, buckets["+Inf"], total, buckets)
        elif name == ACCEPTED_PER_POSITION:
            yield Vector(name, labels, [int(value) for value in values])
        elif family.type == "counter":
            yield Counter(name, labels, int(values[0]))
        else:
            yield Gauge(name, labels, float(values[0]))
