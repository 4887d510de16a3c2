"""Prometheus and Grafana: the dashboard is current, and the check of its queries finds faults.

``tests/acceptance/e2e/test_speculation.py`` runs that check on a server.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deploy import DEPLOY, load_script
from tests.support.ports import free_port
from tests.support.promql import Query, all_faults, filled_in, queries
from tests.support.served import serving

EXPOSITION = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{engine="0",model_name="m",le="1.0"} 1
vllm:e2e_request_latency_seconds_bucket{engine="0",model_name="m",le="+Inf"} 1
vllm:e2e_request_latency_seconds_count{engine="0",model_name="m"} 1
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="m"} 1
"""


def test_the_dashboard_is_what_the_script_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["grafana_dashboard", "--check"])
    assert load_script("grafana_dashboard").main() == 0, "run: python scripts/grafana_dashboard.py"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("sum(vllm:num_requests_running)", None),
        ('sum(rate(vllm:prompt_tokens_total{engine="0"}[5m]))', None),
        ("histogram_quantile(0.9, sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket[5m])))", None),
        ("vllm:num_requests_waiting", "no such metric"),
        ("rate(vllm:num_requests_running[5m])", "a gauge with an interval"),
        ("sum(vllm:prompt_tokens_total)", "without a rate"),
        ("max_over_time(vllm:prompt_tokens_total[5m])", "not in rate()"),
        ("vllm:prompt_tokens", "no such metric"),
        ("sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket[5m]))", "not in a histogram_quantile"),
        (
            "histogram_quantile(0.9, sum(rate(vllm:e2e_request_latency_seconds_bucket[5m])))",
            "not in a histogram_quantile by le",
        ),
        ('vllm:num_requests_running{rank="0"}', "no label rank"),
        ("sum by (reason) (vllm:num_requests_running)", "label reason"),
        ("sum(vllm:num_requests_running", "parentheses"),
    ],
)
def test_the_check_of_queries_finds_faults(text: str, fault: str | None) -> None:
    found = all_faults(EXPOSITION, [Query("here", text)])
    assert (found == []) == (fault is None), found
    assert fault is None or fault in "".join(found)


def test_a_legend_needs_its_label_in_the_result() -> None:
    shown = frozenset({"engine"})
    assert all_faults(EXPOSITION, [Query("here", "sum(vllm:num_requests_running)", shown)])
    assert not all_faults(EXPOSITION, [Query("here", "sum by (engine) (vllm:num_requests_running)", shown)])


def test_prometheus_and_grafana_find_what_the_compose_file_mounts() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    for name in ("prometheus", "grafana", "searxng"):
        for volume in services[name]["volumes"]:
            if volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).exists(), volume
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8"))
    assert config["rule_files"] == ["alerts.yml"]
    [scrape] = config["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["chorale:8000"]}]
    assert "chorale" in services["demo"]["networks"]["front"]["aliases"]
    provisioning = DEPLOY / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text("utf-8"))[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "chorale.yaml").read_text("utf-8"))[
        "providers"
    ]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]


def ask(port: int, path: str, **fields: str) -> Any:
    url = f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(fields)}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs the program prometheus (Debian: prometheus)"
)
def test_a_prometheus_answers_every_query(tmp_path: Path) -> None:
    """Scrapes a server and asks each query; only those about rare events have no result."""
    port = free_port()
    drafts = '{"method": "ngram", "num_speculative_tokens": 3}'
    with serving("demo", tmp_path, "--data-parallel-size", "2", "--speculative-config", drafts) as server:
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8"))
        config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(DEPLOY / "prometheus" / "alerts.yml", tmp_path)
        command = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, f"--storage.tsdb.path={tmp_path}/data"], cwd=tmp_path, stderr=log
            )
        try:
            empty = answers_of(port, server)
        finally:
            process.terminate()
            process.wait(timeout=20)
    rare = ("Aborted", "built-in tools", "Repaired", "alert:", "keda")
    assert [each for each in empty if not any(word in each for word in rare)] == []


def answers_of(port: int, server: Any) -> list[str]:
    """Returns the places of queries without a result."""
    client = server.client()
    messages: Any = [{"role": "user", "content": "Repeat: red apple, green pear, blue plum"}]
    deadline = time.monotonic() + 60
    for number in range(8):
        for _ in range(2):
            client.chat.completions.create(model="demo", messages=messages, max_tokens=40, temperature=0)
        while time.monotonic() < deadline:
            try:
                up = ask(port, "/api/v1/query", query=f"count_over_time(up[1m]) > {2 * number}")["data"][
                    "result"
                ]
            except OSError:
                up = []
            if up:
                break
            time.sleep(0.3)
    empty = []
    for query in queries():
        answer = ask(port, "/api/v1/query", query=filled_in(query.text))
        assert answer["status"] == "success", query
        if not answer["data"]["result"]:
            empty.append(query.place)
    rules = ask(port, "/api/v1/rules")["data"]["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} == {"ok"}
    return empty
