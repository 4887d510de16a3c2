"""Writes deploy/grafana/dashboards/chorale.json: `python scripts/grafana_dashboard.py [--check]`.

``ROWS`` is the dashboard: rows of panels, each with a unit and queries by legend. In queries, ``{}`` stands
for the labels that the dashboard's variables choose, and ``[]`` for the interval of a rate.
``tests/deploy`` compares every query with the ``/metrics`` of a server.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "dashboards" / "chorale.json"
LABELS = '{model_name=~"$model",instance=~"$instance",engine=~"$engine"}'
HTTP_LABELS = '{instance=~"$instance"}'
ENGINE = "{{instance}} engine {{engine}}"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    title: str
    unit: str
    queries: dict[str, str]  # legend -> query
    about: str = ""
    kind: str = "timeseries"
    stacked: bool = False
    most: float | None = None  # maximum of the axis


def quantiles(metric: str, *shares: float) -> dict[str, str]:
    return {
        f"p{round(share * 100)}": f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket{{}}[])))"
        for share in shares
    }


def mean(metric: str) -> str:
    return f"sum(rate({metric}_sum{{}}[])) / sum(rate({metric}_count{{}}[]))"


def each(metric: str) -> str:
    """Returns a counter's rate by engine."""
    return f"sum by (instance, engine) (rate({metric}{{}}[]))"


def share_of(part: str, whole: str, by: str = "") -> str:
    return f"sum{by} (rate({part}{{}}[])) / sum{by} (rate({whole}{{}}[]))"


BY_ENGINE = " by (instance, engine)"
ERRORS = (
    'sum(rate(http_requests_total{status="5xx",}[])) / sum(rate(http_requests_total{}[])) '
    "or 0 * sum(rate(http_requests_total{}[]))"
)

ROWS: dict[str, list[Panel]] = {
    "Now": [
        Panel(
            "Running",
            "short",
            {"running": "sum(vllm:num_requests_running{})"},
            "Sequences in the batch",
            "stat",
        ),
        Panel(
            "Waiting",
            "short",
            {"waiting": "sum(vllm:num_requests_waiting{})"},
            "Sequences in the queue",
            "stat",
        ),
        Panel(
            "Output tokens per second",
            "short",
            {"tok/s": "sum(rate(vllm:generation_tokens_total{}[]))"},
            "",
            "stat",
        ),
        Panel(
            "KV blocks in use, fullest engine",
            "percentunit",
            {"used": "max(vllm:kv_cache_usage_perc{})"},
            "",
            "stat",
        ),
        Panel(
            "Prefix cache hits",
            "percentunit",
            {"hits": share_of("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")},
            "Share of the prompt tokens that were found in the cache",
            "stat",
        ),
        Panel(
            "Server errors",
            "percentunit",
            {"5xx": ERRORS},
            "Share of HTTP requests that ended as 5xx",
            "stat",
        ),
    ],
    "Latency": [
        Panel(
            "Time to first token",
            "s",
            quantiles("vllm:time_to_first_token_seconds", 0.5, 0.9, 0.99),
            "From the arrival of a request",
        ),
        Panel("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds", 0.5, 0.9, 0.99)),
        Panel("Whole request", "s", quantiles("vllm:e2e_request_latency_seconds", 0.5, 0.9, 0.99)),
        Panel(
            "Where the time goes",
            "s",
            {
                "queue": mean("vllm:request_queue_time_seconds"),
                "prefill": mean("vllm:request_prefill_time_seconds"),
                "decode": mean("vllm:request_decode_time_seconds"),
            },
            "Means per request",
            stacked=True,
        ),
    ],
    "Load": [
        Panel("Running, by engine", "short", {ENGINE: "vllm:num_requests_running{}"}),
        Panel("Waiting, by engine", "short", {ENGINE: "vllm:num_requests_waiting{}"}),
        Panel(
            "Waiting, by reason",
            "short",
            {"{{reason}}": "sum by (reason) (vllm:num_requests_waiting_by_reason{})"},
            "capacity: no room in the batch; deferred: a grammar or a shared prompt is not ready",
            stacked=True,
        ),
        Panel("KV blocks in use", "percentunit", {ENGINE: "vllm:kv_cache_usage_perc{}"}, most=1),
        Panel(
            "Preemptions",
            "ops",
            {ENGINE: each("vllm:num_preemptions_total")},
            "Sequences that had to start again",
        ),
        Panel(
            "Refused because the queue was full",
            "ops",
            {"{{instance}}": "sum by (instance) (rate(chorale:queue_rejections_total{}[]))"},
            "HTTP status 429",
        ),
    ],
    "Tokens": [
        Panel(
            "Output tokens per second", "short", {ENGINE: each("vllm:generation_tokens_total")}, stacked=True
        ),
        Panel(
            "Prompt tokens per second, by source",
            "short",
            {"{{source}}": "sum by (source) (rate(vllm:prompt_tokens_by_source_total{}[]))"},
            "Computed, or found in a cache",
            stacked=True,
        ),
        Panel("Tokens in an engine step", "short", {"mean": mean("vllm:iteration_tokens_total")}),
        Panel("Engine steps per second", "short", {ENGINE: each("chorale:engine_steps_total")}),
        Panel("Prompt length", "short", quantiles("vllm:request_prompt_tokens", 0.5, 0.99)),
        Panel("Output length", "short", quantiles("vllm:request_generation_tokens", 0.5, 0.99)),
    ],
    "Prefix cache": [
        Panel(
            "Hits, by engine",
            "percentunit",
            {ENGINE: share_of("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", BY_ENGINE)},
            "Share of the prompt tokens that were looked up and found",
            most=1,
        ),
        Panel(
            "Prompt tokens that were computed again",
            "short",
            {ENGINE: each("vllm:prompt_tokens_recomputed_total")},
            "The last token of a prompt that is in the cache as a whole",
        ),
    ],
    "Speculative decoding (empty without --speculative-config)": [
        Panel(
            "Tokens per step and sequence",
            "short",
            {
                ENGINE: "1 + "
                + share_of(
                    "vllm:spec_decode_num_accepted_tokens_total",
                    "vllm:spec_decode_num_drafts_total",
                    BY_ENGINE,
                )
            },
            "Acceptance length: accepted draft tokens of a draft, plus one",
        ),
        Panel(
            "Accepted draft tokens",
            "percentunit",
            {
                ENGINE: share_of(
                    "vllm:spec_decode_num_accepted_tokens_total",
                    "vllm:spec_decode_num_draft_tokens_total",
                    BY_ENGINE,
                )
            },
            most=1,
        ),
        Panel(
            "Accepted, by position",
            "percentunit",
            {
                "position {{position}}": (
                    "sum by (position) (rate(vllm:spec_decode_num_accepted_tokens_per_pos_total{}[])) "
                    "/ on () group_left () sum(rate(vllm:spec_decode_num_drafts_total{}[]))"
                )
            },
            most=1,
        ),
        Panel("Drafts per second", "short", {ENGINE: each("vllm:spec_decode_num_drafts_total")}),
        Panel(
            "How engines draft",
            "short",
            {f"{ENGINE}: {{{{drafts}}}}, synthetic {{{{synthetic}}}}": "chorale:speculation_info{}"},
            "synthetic true: drafts are accepted by a profile, so the output has no meaning",
        ),
    ],
    "Requests and errors": [
        Panel(
            "Finished, by reason",
            "ops",
            {"{{finished_reason}}": "sum by (finished_reason) (rate(vllm:request_success_total{}[]))"},
            stacked=True,
        ),
        Panel(
            "Aborted, by reason", "ops", {"{{reason}}": "sum by (reason) (rate(chorale:aborts_total{}[]))"}
        ),
        Panel(
            "HTTP, by status",
            "reqps",
            {"{{status}}": "sum by (status) (rate(http_requests_total{}[]))"},
            stacked=True,
        ),
        Panel(
            "HTTP duration, p99 by endpoint",
            "s",
            {
                "{{handler}}": (
                    "histogram_quantile(0.99, "
                    "sum by (le, handler) (rate(http_request_duration_seconds_bucket{}[])))"
                )
            },
        ),
        Panel(
            "Engine restarts",
            "short",
            {ENGINE: "increase(chorale:engine_restarts_total{}[1h])"},
            "In the last hour",
        ),
        Panel(
            "Ended because of logits that were not finite",
            "short",
            {ENGINE: "increase(vllm:corrupted_requests_total{}[1h])"},
            "In the last hour",
        ),
    ],
    "Tools, harmony and the response store": [
        Panel(
            "Calls of built-in tools",
            "ops",
            {"{{tool}} {{status}}": "sum by (tool, status) (rate(chorale:tool_calls_total{}[]))"},
        ),
        Panel(
            "Repaired harmony output",
            "ops",
            {"{{kind}}": "sum by (kind) (rate(chorale:harmony_repairs_total{}[]))"},
        ),
        Panel(
            "Response store works",
            "bool",
            {"{{instance}}": "min by (instance) (chorale:response_store_up{})"},
        ),
        Panel(
            "Responses that could not be stored",
            "short",
            {"{{instance}}": "sum by (instance) (increase(chorale:response_store_failures_total{}[1h]))"},
            "In the last hour",
        ),
        Panel("Contents of the response store", "bytes", {"{{instance}}": "chorale:response_store_bytes{}"}),
        Panel(
            "Objects in the response store",
            "short",
            {
                "responses": "max(chorale:response_store_responses{})",
                "conversations": "max(chorale:response_store_conversations{})",
                "running in the background": "max(chorale:background_responses{})",
            },
        ),
    ],
    "Batches": [
        Panel(
            "Lines answered",
            "ops",
            {"{{status}}": "sum by (status) (rate(chorale:batch_lines_total{}[]))"},
            "Not included in other counts of requests, nor in latencies",
        ),
        Panel(
            "Batches that have not ended",
            "short",
            {"{{status}}": "max by (status) (chorale:batches{})"},
            "Over all servers that share a store",
        ),
        Panel("Files", "short", {"files": "max(chorale:files{})"}),
        Panel("Contents of files", "bytes", {"bytes": "max(chorale:file_bytes{})"}),
    ],
    "Memory and processes": [
        Panel(
            "Memory of ranks",
            "bytes",
            {"{{instance}} engine {{engine}} rank {{rank}}: {{kind}}": "chorale:rank_memory_bytes{}"},
            stacked=True,
        ),
        Panel(
            "CPU of engine processes",
            "percentunit",
            {"{{instance}} {{engine}}": f"rate(chorale:engine_process_cpu_seconds_total{HTTP_LABELS}[])"},
            "1 is one core",
        ),
        Panel(
            "Resident memory of engine processes",
            "bytes",
            {"{{instance}} {{engine}}": f"chorale:engine_process_resident_memory_bytes{HTTP_LABELS}"},
        ),
    ],
}


def expand(query: str) -> str:
    """Fills in the labels of ``{}``, after any given ones (``{a="b",}``), and the interval of ``[]``."""

    def labelled(match: re.Match[str]) -> str:
        chosen = HTTP_LABELS if match[1].startswith("http_") else LABELS
        return f"{match[1]}{{{match[2]}{chosen[1:]}"

    query = re.sub(r'([a-z_]+(?::\w+)?)\{((?:\w+="\w+",)?)\}', labelled, query)
    return query.replace("[]", "[$__rate_interval]")


def render_panel(panel: Panel, position: dict[str, int], number: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(65 + index), "datasource": SOURCE, "expr": expand(query), "legendFormat": legend}
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    custom = {"fillOpacity": 20 if panel.stacked else 5, "showPoints": "never", "spanNulls": False}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    if panel.most is not None:
        defaults["max"] = panel.most
    options: dict[str, Any] = {
        "legend": {"displayMode": "list"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "value"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "gridPos": position,
        "datasource": SOURCE,
        "targets": targets,
        "options": options,
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }


def panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        position = {"x": 0, "y": top, "w": 24, "h": 1}
        made.append(
            {"id": len(made) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": position}
        )
        top += 1
        columns, height = (len(row), 4) if row[0].kind == "stat" else (3 if len(row) in (3, 5, 6) else 2, 8)
        for index, panel in enumerate(row):
            line, column = divmod(index, columns)
            width = 24 // columns
            position = {"x": column * width, "y": top + line * height, "w": width, "h": height}
            made.append(render_panel(panel, position, len(made) + 1))
        top += -(-len(row) // columns) * height
    return made


def variable(name: str, label: str, metric: str) -> dict[str, Any]:
    query = f"label_values({metric}, {'model_name' if name == 'model' else name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "definition": query,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 3,
    }


def dashboard() -> dict[str, Any]:
    running = "vllm:num_requests_running"
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "chorale",
        "title": "Chorale",
        "tags": ["chorale", "vllm", "gpt-oss"],
        "schemaVersion": 41,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                source,
                variable("model", "Model", running),
                variable("instance", "Instance", running),
                variable("engine", "Engine", running),
            ]
        },
        "panels": panels(),
    }


def main() -> int:
    made = dashboard()
    lines = ",\n".join(json.dumps(panel) for panel in made.pop("panels"))
    text = f'{json.dumps(made, indent=1)[:-2]},\n "panels": [\n{lines}\n ]\n}}\n'
    if "--check" in sys.argv[1:]:
        return int(TARGET.read_text("utf-8") != text)
    TARGET.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
