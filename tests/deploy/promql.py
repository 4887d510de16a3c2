"""PromQL of the dashboard, the alerts and the autoscalers, compared with a server's ``/metrics``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import yaml
from prometheus_client.parser import text_string_to_metric_families

from chorale.api.telemetry.metric_names import COUNTERS
from tests.deploy.files import DEPLOY, objects

GIVEN = {
    "instance",
    "job",
    "namespace",
    "pod",
    "app",
    "app_kubernetes_io_name",
}  # labels added by Prometheus
SELECTOR = re.compile(r"((?:vllm|chorale):\w+|http_\w+|\bup\b)(\{[^}]*\})?(\[[^]]+\])?")
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "chorale.json"


class Query(NamedTuple):
    """A query, its location, and the labels in its legend or message."""

    place: str
    text: str
    shown: frozenset[str] = frozenset()


def queries() -> Iterator[Query]:
    """Yields every query of ``deploy/``."""
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            shown = frozenset(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            yield Query(f"dashboard: {panel['title']}", target["expr"], shown)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            [metric, label] = re.findall(r"[\w:]+", variable["query"])[1:]
            yield Query(f"variable: {variable['name']}", metric, frozenset({label}))
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text("utf-8"))
    for rule in alerts["groups"][0]["rules"]:
        shown = frozenset(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        yield Query(f"alert: {rule['alert']}", rule["expr"], shown)
    for source in objects():
        if source.kind == "ScaledObject":
            yield Query(source.file, source.content["spec"]["triggers"][0]["metadata"]["query"])


class Exposed(NamedTuple):
    """A metric of a server: the type of its family, and its labels."""

    kind: str
    labels: frozenset[str]


def exposed(text: str) -> dict[str, Exposed]:
    """Parses metrics in text format. A family without samples gets the labels of the table of counters."""
    found: dict[str, Exposed] = {"up": Exposed("gauge", frozenset())}
    for family in text_string_to_metric_families(text):
        labels = {name for sample in family.samples for name in sample.labels}
        if family.name in COUNTERS:
            labels |= set(COUNTERS[family.name][1])
            labels |= set() if family.name.startswith("http_") else {"engine", "model_name"}
        if family.name.startswith("chorale:engine_process_"):
            labels.add("engine")  # a server with one engine omits it
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        for end in ends:
            kept = labels if end == "_bucket" else labels - {"le"}
            base = family.name.removesuffix("_total") if family.type == "counter" else family.name
            found[base + end] = Exposed(family.type, frozenset(kept))
    return found


def faults(query: Query, found: dict[str, Exposed]) -> Iterator[str]:
    """Yields the faults of a query for a server with these metrics."""
    text = query.text
    if text.count("(") != text.count(")"):
        yield "parentheses are not balanced"
    grouped = {each for group in re.findall(r"\bby \(([^)]*)\)", text) for each in re.findall(r"\w+", group)}
    available = set(GIVEN)
    for match in SELECTOR.finditer(text):
        name, labels, interval = match.groups()
        if name not in found:
            yield f"{name}: the server has no such metric"
            continue
        kind, has = found[name]
        available |= has
        for label in re.findall(r"(\w+)(?:=~|!~|!=|=)", labels or ""):
            if label not in has | GIVEN:
                yield f"{name} has no label {label}"
        function = re.search(r"(\w+)\($", text[: match.start()])
        counts = kind == "counter" or (kind == "histogram")
        if interval and not (counts and function and function[1] in ("rate", "increase")):
            yield f"{name}: a {kind} with an interval, not in rate() or increase()"
        if counts and not interval:
            yield f"{name}: a {kind} without a rate"
        if name.endswith("_bucket") and not (grouped >= {"le"} and "histogram_quantile(" in text):
            yield f"{name}: not in a histogram_quantile by le"
    yield from (f"no metric has the label {label}" for label in sorted((grouped | query.shown) - available))
    aggregated = re.match(r"(?:1 \+ )?(?:sum|max|min|histogram_quantile|0 \*)\b", text) is not None
    if aggregated and not query.shown <= grouped:
        yield f"the result has no label {', '.join(sorted(query.shown - grouped))}"


def all_faults(text: str, chosen: Iterable[Query] | None = None) -> list[str]:
    found = exposed(text)
    given = queries() if chosen is None else chosen
    return [f"{query.place}: {fault}" for query in given for fault in faults(query, found)]
