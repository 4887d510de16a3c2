"""Metrics of a benchmark, and their printed form: vLLM's lines in vLLM's order, which scripts parse."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chorale.measure.bench.drafts import SYNTHETIC, DraftCounts
from chorale.measure.bench.load import Outcome

TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
WIDTH = 50


def percentile(values: Sequence[float], share: float) -> float:
    """Returns a percentile by linear interpolation, 0 for no values."""
    return float(np.percentile(values, share)) if values else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """The metrics of a benchmark. Times are in milliseconds and rates per second unless noted."""

    completed: int
    failed: int
    duration: float  # seconds
    total_input_tokens: int
    total_output_tokens: int
    max_output_tokens_per_s: float  # highest in any one second
    max_concurrent_requests: int
    latencies: dict[str, list[float]]  # latencies of completed requests, by metric
    errors: tuple[str, ...]
    request_goodput: float | None = None  # requests a second that met every goal; None without goals

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration if self.duration else 0.0

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration if self.duration else 0.0

    @property
    def total_token_throughput(self) -> float:
        tokens = self.total_input_tokens + self.total_output_tokens
        return tokens / self.duration if self.duration else 0.0


def summarise(
    outcomes: Sequence[Outcome], duration: float, goals: Mapping[str, float] | None = None
) -> Summary:
    """Summarises outcomes.

    ``goals``: limits in milliseconds (ttft, tpot, e2el) within which a request counts as good.
    """
    good = [each for each in outcomes if not each.error]
    met = sum(_meets(each, goals) for each in good) if goals else 0
    return Summary(
        completed=len(good),
        failed=len(outcomes) - len(good),
        duration=duration,
        total_input_tokens=sum(each.prompt_tokens for each in good),
        total_output_tokens=sum(each.output_tokens for each in good),
        max_output_tokens_per_s=_busiest_second(good),
        max_concurrent_requests=_most_at_once(good),
        latencies={
            "ttft": [each.ttft * 1e3 for each in good],
            "tpot": [each.tpot * 1e3 for each in good if each.tpot is not None],
            "itl": [gap * 1e3 for each in good for gap in each.itl],
            "e2el": [each.latency * 1e3 for each in good],
        },
        errors=tuple(each.error for each in outcomes if each.error),
        request_goodput=(met / duration if duration else 0.0) if goals else None,
    )


def _meets(outcome: Outcome, goals: Mapping[str, float]) -> bool:
    """Returns whether a request met every goal. The tpot of a single token is 0, as in vLLM."""
    took = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(took[name] * 1e3 <= most for name, most in goals.items())


def _busiest_second(outcomes: Sequence[Outcome]) -> float:
    """Returns the most tokens in any second. All pieces of a request count as equally many tokens."""
    seconds: dict[int, float] = {}
    for each in outcomes:
        share = each.output_tokens / (1 + len(each.itl))
        now = each.start + each.ttft
        for gap in (0.0, *each.itl):
            now += gap
            seconds[int(now)] = seconds.get(int(now), 0.0) + share
    return max(seconds.values(), default=0.0)


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    moments = sorted(
        [(each.start, 1) for each in outcomes] + [(each.start + each.latency, -1) for each in outcomes]
    )
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def block(
    summary: Summary,
    *,
    rate: float,
    concurrency: int | None,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    drafts: DraftCounts | None = None,
) -> str:
    """Returns the printed result. ``drafts``: draft counters of the benchmark, if the server drafts.

    Raises ``KeyError`` for a metric that is not in ``TITLES``.
    """
    goodput = summary.request_goodput
    lines = [
        " Serving Benchmark Result ".center(WIDTH, "="),
        _line("Successful requests:", summary.completed),
    ]
    lines.append(_line("Failed requests:", summary.failed))
    if concurrency is not None:
        lines.append(_line("Maximum request concurrency:", concurrency))
    if rate != float("inf"):
        lines.append(_line("Request rate configured (RPS):", rate))
    lines += [
        _line("Benchmark duration (s):", summary.duration),
        _line("Total input tokens:", summary.total_input_tokens),
        _line("Total generated tokens:", summary.total_output_tokens),
        _line("Request throughput (req/s):", summary.request_throughput),
        *([] if goodput is None else [_line("Request goodput (req/s):", goodput)]),
        _line("Output token throughput (tok/s):", summary.output_throughput),
        _line("Peak output token throughput (tok/s):", summary.max_output_tokens_per_s),
        _line("Peak concurrent requests:", float(summary.max_concurrent_requests)),
        _line("Total Token throughput (tok/s):", summary.total_token_throughput),
    ]
    for metric in metrics:
        title, short = TITLES[metric]
        values = summary.latencies[metric]
        lines.append(title.center(WIDTH, "-"))
        lines.append(_line(f"Mean {short} (ms):", statistics.fmean(values) if values else 0.0))
        lines.append(_line(f"Median {short} (ms):", percentile(values, 50)))
        lines += [_line(f"P{share:g} {short} (ms):", percentile(values, share)) for share in percentiles]
    if drafts is not None:
        lines += _draft_lines(drafts)
        if drafts.is_synthetic:
            lines = [f"{line:<52} ({SYNTHETIC})" for line in lines]
    return "\n".join([*lines, "=" * WIDTH])


def _draft_lines(drafts: DraftCounts) -> list[str]:
    lines = [
        "Speculative Decoding".center(WIDTH, "-"),
        _line("Acceptance rate (%):", drafts.acceptance_rate),
        _line("Acceptance length:", drafts.acceptance_length),
        _line("Drafts:", drafts.drafts),
        _line("Draft tokens:", drafts.draft_tokens),
        _line("Accepted tokens:", drafts.accepted_tokens),
    ]
    if drafts.rates:
        lines.append("Per-position acceptance (%):")
        lines += [_line(f"  Position {index}:", 100 * rate) for index, rate in enumerate(drafts.rates)]
    return lines


def _line(name: str, value: float) -> str:
    return f"{name:<40} " + (f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}")


def to_json(summary: Summary, percentiles: Sequence[float]) -> dict[str, Any]:
    """Returns the summary under the keys of vLLM's result file."""
    found: dict[str, Any] = {
        "duration": summary.duration,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.total_input_tokens,
        "total_output_tokens": summary.total_output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.request_goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_token_throughput,
        "max_output_tokens_per_s": summary.max_output_tokens_per_s,
        "max_concurrent_requests": summary.max_concurrent_requests,
    }
    for metric, values in summary.latencies.items():
        found[f"mean_{metric}_ms"] = statistics.fmean(values) if values else 0.0
        found[f"median_{metric}_ms"] = percentile(values, 50)
        found[f"std_{metric}_ms"] = statistics.pstdev(values) if values else 0.0
        for share in percentiles:
            found[f"p{share:g}_{metric}_ms"] = percentile(values, share)
    return found
