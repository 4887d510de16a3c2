"""Manifests, the rendered chart and KServe's files match schemas, references and the server's interface."""

from __future__ import annotations

import importlib.util
import re
import shutil
from typing import Any

import pytest
import yaml

from chorale.config.engine import ServerConfig
from tests.deploy.files import (
    DEPLOY,
    DRAIN_SLACK,
    KNOWN,
    Pod,
    Source,
    faults,
    load_script,
    objects,
    pods,
)
from tests.support import ROOT

OBJECTS, PODS = objects(), list(pods())
HOME = "/home/chorale"


@pytest.mark.parametrize("source", OBJECTS, ids=lambda each: f"{each.file}-{each.kind}-{each.name}")
def test_an_object_matches_the_schema_of_its_kind(source: Source) -> None:
    assert faults(source.content) == []


def test_containers_of_kserve_match_the_schema_of_a_pod() -> None:
    """KServe's definitions repeat those of a pod."""
    seen = [pod for pod in PODS if pod.file.startswith("kserve.yaml")]
    assert len(seen) == 2
    for pod in seen:
        spec = {"containers": pod.spec["containers"], "volumes": pod.spec["volumes"]}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        assert faults(body) == []


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.file)
def test_the_command_line_takes_the_arguments(pod: Pod) -> None:
    settings = pod.settings()
    assert settings.notices == ()
    given = [each for each in pod.container["args"] if each.startswith("--api-key-file")]
    assert given in ([], ["--api-key-file=/etc/chorale/api-keys"])
    ports = pod.container["ports"]
    assert [port["containerPort"] for port in ports] == [settings.server.port]
    assert settings.server.host == "0.0.0.0"


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.file)
def test_the_number_of_gpus_matches_the_options(pod: Pod) -> None:
    settings = pod.settings()
    limits = pod.container.get("resources", {}).get("limits", {})
    if pod.file.startswith("kserve.yaml: ServingRuntime"):
        return  # the InferenceService requests them
    wanted = settings.engine.tensor_parallel_size * settings.server.data_parallel_size
    assert int(limits.get("nvidia.com/gpu", 0)) == (0 if settings.engine.device == "cpu" else wanted)


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.file)
def test_probes_ask_what_the_server_serves_without_a_key(pod: Pod) -> None:
    """docs/reference/api.md is generated from the routes."""
    api = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
    for probe, path in (
        ("startupProbe", "/health"),
        ("readinessProbe", "/ready"),
        ("livenessProbe", "/health"),
    ):
        asked = pod.container[probe]["httpGet"]
        assert asked["path"] == path
        assert asked["port"] in ("http", pod.container["ports"][0]["containerPort"])
        encrypted = any(each.startswith("--ssl-certfile") for each in pod.container["args"])
        assert asked.get("scheme", "HTTP") == ("HTTPS" if encrypted else "HTTP")
        assert re.search(rf"^\| GET \| `{path}` \|.*\| no \|$", api, re.MULTILINE)
    startup, liveness = pod.container["startupProbe"], pod.container["livenessProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 1800  # time for a download
    assert liveness["failureThreshold"] * liveness["periodSeconds"] >= 300  # time for an engine to restart
    annotations = str(OBJECTS)
    assert "'prometheus.io/path': '/metrics'" in annotations


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.file)
def test_a_stop_leaves_time_for_running_answers(pod: Pod) -> None:
    pre_stop = int(pod.container["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = pre_stop + pod.settings().server.shutdown_timeout + DRAIN_SLACK
    grace = pod.spec.get("terminationGracePeriodSeconds")
    if grace is None:  # a ServingRuntime has no such field: the InferenceService has
        [service] = [each.content for each in OBJECTS if each.kind == "InferenceService"]
        grace = service["spec"]["predictor"]["terminationGracePeriodSeconds"]
    assert grace >= needed
    assert pod.settings().server.shutdown_timeout == ServerConfig().shutdown_timeout


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.file)
def test_containers_have_no_rights_that_they_do_not_need(pod: Pod) -> None:
    strict = not pod.file.startswith("kserve.yaml")  # KServe has another home folder
    outer = pod.spec.get("securityContext", {})
    if strict:
        assert outer["runAsNonRoot"] is True
        assert outer["runAsUser"] == outer["fsGroup"] == 1000
        assert outer["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["automountServiceAccountToken"] is False
    for container in (*pod.spec["containers"], *pod.spec.get("initContainers", ())):
        inner = container["securityContext"]
        assert inner["allowPrivilegeEscalation"] is False
        assert inner["capabilities"] == {"drop": ["ALL"]}
        assert inner.get("runAsNonRoot", outer.get("runAsNonRoot")) is True
        assert not strict or inner["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.file)
def test_variables_have_readers_and_secrets_come_from_secrets(pod: Pod) -> None:
    for variable in pod.container.get("env", ()):
        assert variable["name"] in KNOWN
        if re.search("KEY|TOKEN|PASSWORD", variable["name"]):
            assert "secretKeyRef" in variable["valueFrom"]
    for flag in ("--api-key=", "--hf-token"):
        assert not any(each.startswith(flag) for each in pod.container["args"])


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.file)
def test_mounts_and_volumes_agree_and_what_the_server_writes_is_mounted(pod: Pod) -> None:
    volumes = {each["name"]: each for each in pod.spec.get("volumes", ())}
    containers = [*pod.spec["containers"], *pod.spec.get("initContainers", ())]
    mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
    assert mounted == set(volumes)
    places = {each["mountPath"] for each in pod.container["volumeMounts"]}
    if any(each.startswith("--api-key-file") for each in pod.container["args"]):
        assert volumes["keys"]["secret"]["items"] == [{"key": "api-keys", "path": "api-keys"}]
        assert "/etc/chorale" in places
    if pod.container["securityContext"].get("readOnlyRootFilesystem"):
        needed = {f"{HOME}/.cache", "/tmp"}
        if pod.settings().engine.device != "cpu":
            needed |= {"/var/cache/chorale/triton", "/dev/shm"}
        if pod.settings().server.response_store is None:
            needed |= {f"{HOME}/.local/state"}
        assert needed <= places


@pytest.mark.parametrize("file", sorted({each.file for each in OBJECTS if each.file.startswith("rendered")}))
def test_the_chart_selects_its_pods_and_not_its_test(file: str) -> None:
    check_selectors([each.content for each in OBJECTS if each.file == file])


def test_the_manifests_select_their_pods() -> None:
    files = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    check_selectors([each.content for each in OBJECTS if each.file in files])


def check_selectors(content: list[dict[str, Any]]) -> None:
    [deployment] = [each for each in content if each["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    labels, name = template["metadata"]["labels"], deployment["metadata"]["name"]
    chosen = deployment["spec"]["selector"]["matchLabels"]
    assert chosen.items() <= labels.items()
    for each in content:
        spec, kind = each.get("spec", {}), each["kind"]
        if kind == "Pod":
            assert not chosen.items() <= each["metadata"]["labels"].items()
        if kind == "Service" and each["metadata"]["name"] == name:
            assert spec["selector"].items() <= labels.items()
            assert spec["ports"][0]["targetPort"] == "http"
        if kind in ("PodDisruptionBudget", "PodMonitor", "InferencePool"):
            assert spec["selector"]["matchLabels"].items() <= labels.items()
        if kind == "NetworkPolicy" and each["metadata"]["name"] == name:
            assert spec["podSelector"]["matchLabels"].items() <= labels.items()
        if kind == "PodMonitor":
            assert labels[spec["jobLabel"]] == "chorale"  # the job name in the alerts
        if kind == "PrometheusRule":
            assert spec == yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text("utf-8"))
        if kind == "Ingress":
            [path] = spec["rules"][0]["http"]["paths"]
            assert path["backend"]["service"] == {"name": name, "port": {"name": "http"}}
        if kind in ("HorizontalPodAutoscaler", "ScaledObject"):
            assert spec["scaleTargetRef"]["name"] == name
        if kind == "InferencePool":
            assert spec["targetPorts"] == [
                {"number": template["spec"]["containers"][0]["ports"][0]["containerPort"]}
            ]
        if kind == "InferenceObjective":
            assert spec["poolRef"]["name"] == name
        if kind == "HTTPRoute":
            [backend] = spec["rules"][0]["backendRefs"]
            assert backend["name"] == name


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod.file)
def test_files_and_batches_work_with_postgresql(pod: Pod) -> None:
    """Without shared storage for all replicas, /v1/files and /v1/batches are off."""
    server = pod.settings().server
    if (server.response_store or "").startswith("postgresql:"):
        place = server.batch_storage or ""
        mounts = {each["mountPath"] for each in pod.container["volumeMounts"]}
        assert place.startswith("s3://") or any(place.startswith(f"{each}/") for each in mounts)


def test_claims_and_secrets_in_the_manifests_exist() -> None:
    content = [each.content for each in OBJECTS if (DEPLOY / "kubernetes" / each.file).exists()]
    claims = {each["metadata"]["name"] for each in content if each["kind"] == "PersistentVolumeClaim"}
    [secret] = [each for each in content if each["kind"] == "Secret"]
    assert set(secret["stringData"].values()) == {""}  # no text that could be used as a key
    text = (DEPLOY / "kubernetes" / "deployment.yaml").read_text("utf-8")
    assert set(re.findall(r"claimName: ([\w-]+)", text)) == claims
    for path in ("deployment.yaml", "postgres.yaml"):
        found = re.findall(
            r"secretKeyRef: \{name: (\w+), key: ([\w-]+)(, optional: true)?\}",
            (DEPLOY / "kubernetes" / path).read_text(),
        )
        assert all(
            name == "chorale" and (key in secret["stringData"] or optional) for name, key, optional in found
        )


def test_scaling_reads_metrics_of_the_server() -> None:
    names = {"vllm:num_requests_running", "vllm:num_requests_waiting"}
    adapter = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter-values.yaml").read_text("utf-8"))
    [rule] = adapter["rules"]["custom"]
    assert set(re.findall(r"vllm:\w+", rule["metricsQuery"])) == names
    for source in OBJECTS:
        if source.kind == "HorizontalPodAutoscaler":
            [metric] = source.content["spec"]["metrics"]
            assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
        if source.kind == "ScaledObject":
            [trigger] = source.content["spec"]["triggers"]
            assert set(re.findall(r"vllm:\w+", trigger["metadata"]["query"])) == names


def test_the_rendered_chart_is_current() -> None:
    """Compares the digest in the first line, without Helm. scripts/check_deploy.sh renders it again."""
    script = load_script("render_chart")
    assert (script.CHART / "files" / "alerts.yml").read_bytes() == script.ALERTS.read_bytes()
    cases = {path.name for path in (script.CHART / "ci").glob("*.yaml")}
    assert {path.name for path in script.RENDERED.glob("*.yaml")} == cases
    for path in script.RENDERED.glob("*.yaml"):
        head = path.read_text("utf-8").partition("\n")[0]
        assert head.endswith(script.digest()), "run: python scripts/render_chart.py"


def test_the_files_name_the_tag_that_the_docs_push() -> None:
    version = yaml.safe_load((DEPLOY / "helm" / "chorale" / "Chart.yaml").read_text("utf-8"))["appVersion"]
    image = f"registry.example/chorale:{version}"
    docker = (ROOT / "docs" / "how-to" / "docker.md").read_text("utf-8")
    assert f"-t {image} --build-arg VERSION={version} . && docker push {image}" in docker
    kustomization = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text("utf-8"))
    [named] = kustomization["images"]
    assert f"{named['newName']}:{named['newTag']}" == image
    assert {pod.container["image"] for pod in PODS if pod.file.startswith("kserve.yaml")} == {image}


def test_the_page_shows_the_values_of_eight_gpus() -> None:
    page = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text("utf-8")
    [shown] = re.findall(r"^```yaml\n(model: .*?)^```$", page, re.MULTILINE | re.DOTALL)
    values = DEPLOY / "helm" / "chorale" / "ci" / "gpt-oss-120b-8-gpus.yaml"
    assert yaml.safe_load(shown) == yaml.safe_load(values.read_text("utf-8"))


@pytest.mark.skipif(
    shutil.which("helm") is None and importlib.util.find_spec("helm_python") is None,
    reason="needs the program helm or the package helm-python-sdk",
)
def test_helm_renders_the_committed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["render_chart", "--check"])
    assert load_script("render_chart").main() == 0
