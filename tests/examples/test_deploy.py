"""The files of examples/deploy agree with each other and with the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from chorale.cli.options.settings import Settings, merge

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SERVICE = COMPOSE["services"]["chorale"]
DEPLOYMENT, ENTRY, *CLAIMS = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8"))
POD = DEPLOYMENT["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
HOME = "/home/chorale"


def exec_form(instruction: str) -> list[str]:
    found = re.search(rf"^{instruction} (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found is not None
    return list(json.loads(found[1]))


ARGUMENTS = {"compose": SERVICE["command"], "kubernetes": CONTAINER["args"], "Dockerfile": exec_form("CMD")}


def parsed(name: str) -> Settings:
    return merge(ARGUMENTS[name], {"CHORALE_API_KEY": "secret"})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_command_line_takes_the_arguments(name: str) -> None:
    assert exec_form("ENTRYPOINT") == ["chorale", "serve"]
    settings = parsed(name)
    assert settings.server.host == "0.0.0.0"
    assert settings.server.port == 8000
    assert settings.api_keys == ("secret",)
    assert settings.notices == ()


def test_a_stop_leaves_time_for_running_answers() -> None:
    grace = int(SERVICE["stop_grace_period"].removesuffix("s"))
    assert grace > parsed("compose").server.shutdown_timeout
    assert POD["terminationGracePeriodSeconds"] > parsed("kubernetes").server.shutdown_timeout


def test_probes_ask_what_the_server_serves() -> None:
    """Without a key: docs/api.md is generated from the routes."""
    api = (ROOT / "docs" / "api.md").read_text("utf-8")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = CONTAINER[probe]["httpGet"]["path"]
        assert re.search(rf"^\| GET \| `{path}` \|.*\| no \|$", api, re.MULTILINE), path
    assert "http://localhost:8000/health" in SERVICE["healthcheck"]["test"][-1]


def test_keys_are_required_and_never_written_down() -> None:
    assert SERVICE["environment"]["CHORALE_API_KEY"].startswith("${CHORALE_API_KEY:?")
    [key] = CONTAINER["env"]
    assert key["name"] == "CHORALE_API_KEY"
    assert "secretKeyRef" in key["valueFrom"]


def test_folders_that_must_outlive_a_container_are_volumes() -> None:
    mounts = {each.split(":")[1]: each.split(":")[0] for each in SERVICE["volumes"]}
    assert mounts == {f"{HOME}/.cache": "cache", f"{HOME}/.local/state": "state"}
    assert set(COMPOSE["volumes"]) == set(mounts.values())
    claimed = {each["metadata"]["name"] for each in CLAIMS}
    volumes: dict[str, Any] = {each["name"]: each for each in POD["volumes"]}
    assert {volumes[each["name"]]["name"] for each in CONTAINER["volumeMounts"]} == set(volumes)
    used = {
        each["persistentVolumeClaim"]["claimName"]
        for each in volumes.values()
        if "persistentVolumeClaim" in each
    }
    assert used == claimed
    assert f"WORKDIR {HOME}" in DOCKERFILE


def test_the_service_reaches_the_pod() -> None:
    assert ENTRY["spec"]["selector"].items() <= DEPLOYMENT["spec"]["template"]["metadata"]["labels"].items()
    assert ENTRY["spec"]["ports"][0]["targetPort"] == CONTAINER["ports"][0]["name"]
    assert CONTAINER["ports"][0]["containerPort"] == parsed("kubernetes").server.port


def test_the_image_runs_as_the_user_of_the_pod() -> None:
    """The first user that useradd makes has the number 1000."""
    assert "USER chorale" in DOCKERFILE
    assert POD["securityContext"]["runAsUser"] == POD["securityContext"]["fsGroup"] == 1000
    copied = re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
