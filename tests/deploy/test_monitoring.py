"""Prometheus and Grafana: the dashboard is current, and every query matches metrics of the server.

``tests/acceptance/e2e/test_demo.py`` compares the queries with a server's ``/metrics``, and
``make deploy-check`` has promtool read them.
"""

from __future__ import annotations

import pytest
import yaml

from tests.deploy.files import DEPLOY, load_script


def test_the_dashboard_matches_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
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
