"""Prometheus and Grafana: the dashboard is current, and every query has an answer.

``tests/acceptance/e2e/test_demo_options.py`` compares the queries with a server's ``/metrics``.
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

from tests.deploy.files import DEPLOY, load_script
from tests.deploy.promql import filled_in, queries
from tests.support.ports import free_port
from tests.support.served import serving


def test_the_dashboard_is_what_the_script_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["grafana_dashboard", "--check"])
    assert load_script("grafana_dashboard").main() == 0, "run: python scripts/grafana_dashboard.py"


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
