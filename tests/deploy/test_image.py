"""The Dockerfile, the compose file, the systemd unit and the files for Modal and SkyPilot."""

from __future__ import annotations

import configparser
import json
import re
import runpy
import shlex
import ssl
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from chorale.cli.commands.machine import warm
from chorale.config.options.settings import Settings, merge
from chorale.machine.gpus import find_gpu
from tests.deploy.files import DEPLOY, DOCKERFILE, DRAIN_SLACK, KNOWN, exec_form, load_script, parsed
from tests.support import ROOT
from tests.support.http_server import Asked, HttpServer, Reply

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SERVICES = COMPOSE["services"]
SERVERS = {name: SERVICES[name] for name in ("chorale", "demo")}
SECRET = re.compile("KEY|TOKEN|PASSWORD|SECRET")


def stages() -> dict[str, str]:
    """Returns the text of each stage of the Dockerfile."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)[1:]
    return {name: f"{base}\n{body}" for base, name, body in zip(*[iter(parts)] * 3, strict=True)}


# ---------------------------------------------------------------- Dockerfile


def test_the_image_has_both_targets_and_runs_as_a_numbered_user() -> None:
    """Kubernetes checks runAsNonRoot by the number alone."""
    assert list(stages())[-1] == "cuda"  # the default
    for target in ("cpu", "cuda"):
        text = stages()[target]
        assert text.startswith("base\n")
        users = re.findall(r"^USER (.+)$", text, re.MULTILINE)
        assert users == ["1000:1000"]
        assert "pip install" not in text  # build tools stay in their own stages
    assert "--uid 1000" in stages()["base"]


def test_the_image_starts_the_server_and_checks_its_health() -> None:
    assert exec_form("ENTRYPOINT")[:4] == ["tini", "--", "chorale", "serve"]
    settings = parsed([*exec_form("ENTRYPOINT")[4:], *exec_form("CMD")])
    assert (settings.engine.model, settings.server.host, settings.server.port) == ("demo", "0.0.0.0", 8000)
    other = parsed(
        [*exec_form("ENTRYPOINT")[4:], "--model", "openai/gpt-oss-20b", "--host=::1", "--port", "9"]
    )
    assert (other.engine.model, other.server.host, other.server.port) == ("openai/gpt-oss-20b", "::1", 9)
    assert "EXPOSE 8000" in DOCKERFILE


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ([], "http://127.0.0.1:8000/health"),
        (["--model", "demo", "--port=9"], "http://127.0.0.1:9/health"),
        (["demo", "--host", "::", "--port", "9"], "http://[::1]:9/health"),
        (["demo", "--host=10.0.0.7"], "http://10.0.0.7:8000/health"),
        (["demo", "--ssl-certfile=/tls.crt", "--ssl-keyfile=/tls.key"], "https://127.0.0.1:8000/health"),
    ],
)
def test_the_health_check_follows_the_options(arguments: list[str], url: str) -> None:
    [command] = re.findall(r"^ +CMD (\[.*health.*\])$", DOCKERFILE, re.MULTILINE)
    assert "COPY deploy/health.py /usr/local/lib/chorale/" in DOCKERFILE
    assert json.loads(command) == ["python", "/usr/local/lib/chorale/health.py"]
    health = runpy.run_path(str(DEPLOY / "health.py"))
    key = {"CHORALE_API_KEY": "secret"}  # required when listening on an external address
    assert health["address"]([*exec_form("ENTRYPOINT"), *arguments], key) == url


class Healthy(HttpServer):
    def answer(self, asked: Asked) -> Reply:
        return Reply(200 if asked.path == "/health" else 404)


def test_the_health_check_asks_a_server_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is for another host. A file replaces the command line of process 1."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    openssl = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=llm.example.org"
    made = subprocess.run(
        [*openssl.split(), "-keyout", key, "-out", certificate], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("no openssl to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with Healthy(context) as server:
        options = ["--host=127.0.0.1", f"--port={server.port}", f"--ssl-certfile={certificate}"]
        words = [*exec_form("ENTRYPOINT"), "demo", *options, f"--ssl-keyfile={key}", ""]
        (tmp_path / "cmdline").write_text("\0".join(words))
        health = runpy.run_path(str(DEPLOY / "health.py"))
        monkeypatch.setitem(health["main"].__globals__, "Path", lambda _: tmp_path / "cmdline")
        assert health["main"]() == 0


def test_requirements_have_versions_and_hashes_and_name_no_index() -> None:
    texts = [(DEPLOY / name).read_text("utf-8") for name in ("requirements.txt", "requirements-cuda.txt")]
    pinned: dict[str, str] = {}
    for text in texts:
        head, *blocks = re.split(r"^(?=\S)", text.partition("\n")[2], flags=re.MULTILINE)
        assert head == ""
        for block in blocks:
            assert re.fullmatch(r"[\w.-]+==\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+", block), block[
                :80
            ]
            name, _, version = block.partition(" ")[0].partition("==")
            pinned[name] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = list(project["dependencies"])
    for extra in load_script("lock_requirements").EXTRAS:
        asked += project["optional-dependencies"][extra]
    for each in map(Requirement, asked):
        assert each.specifier.contains(pinned[each.name.lower()]), each


def test_kernels_are_compiled_for_a_known_gpu_where_the_server_looks() -> None:
    defaults = dict(re.findall(r"^ARG (WARM_\w+)=(.*)$", DOCKERFILE, re.MULTILINE))
    assert find_gpu(defaults["WARM_GPU"]).architecture == "sm_90"
    [command] = re.findall(r'chorale (warm "\$WARM_MODEL" --gpu "\$WARM_GPU") \$WARM_OPTIONS', DOCKERFILE)
    assert command
    warm.check(merge([defaults["WARM_MODEL"]], {}).engine, [defaults["WARM_GPU"]])
    [cache] = re.findall(r"TRITON_CACHE_DIR=(\S+)", DOCKERFILE)
    assert f"kernels:{cache}" in SERVICES["chorale"]["volumes"]
    manifest = (DEPLOY / "kubernetes" / "deployment.yaml").read_text("utf-8")
    assert f"command: [cp, --recursive, {cache}/., /kernels]" in manifest


# ---------------------------------------------------------------- compose


@pytest.mark.parametrize("name", SERVERS)
def test_compose_starts_servers_with_existing_options(name: str) -> None:
    command = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", each) for each in SERVERS[name]["command"]]
    settings = parsed([*exec_form("ENTRYPOINT")[4:], *command])
    assert settings.notices == ()
    assert SERVERS[name]["ports"] == ["${CHORALE_BIND:-127.0.0.1}:8000:8000"]
    assert set(SERVERS[name]["environment"]) <= KNOWN
    grace = int(SERVERS[name]["stop_grace_period"].removesuffix("s"))
    assert grace >= settings.server.shutdown_timeout + DRAIN_SLACK
    assert SERVERS[name]["build"]["target"] in stages()
    assert set(SERVERS[name]["build"].get("args", {})) <= set(
        re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE)
    )


def test_the_server_with_a_gpu_finds_its_services() -> None:
    settings = parsed([each for each in SERVICES["chorale"]["command"] if not each.startswith("$")])
    assert settings.server.response_store == "postgresql://chorale@postgres/chorale"
    assert settings.server.tools.search_url == "http://searxng:8080/search"
    assert settings.server.tools.browser == "searxng"
    assert {"postgres", "searxng"} <= set(SERVICES["chorale"]["depends_on"])
    for name in ("postgres", "searxng"):
        assert set(SERVICES[name]["networks"]) & set(SERVICES["chorale"]["networks"])
        assert "ports" not in SERVICES[name]
    assert SERVICES["postgres"]["environment"]["POSTGRES_USER"] == "chorale"
    searxng = yaml.safe_load((DEPLOY / "searxng" / "settings.yml").read_text("utf-8"))
    assert "json" in searxng["search"]["formats"]


def test_no_secret_is_written_down_and_compose_demands_a_key_for_other_machines() -> None:
    for instruction in re.findall(r"^(?:ARG|ENV) (.+)$", DOCKERFILE, re.MULTILINE):
        assert not SECRET.search(instruction)
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            assert not SECRET.search(name) or value.startswith("${"), name
    assert COMPOSE["x-check"].startswith("${CHORALE_BIND:+${CHORALE_API_KEY:?")
    for name, service in SERVICES.items():
        assert all("127.0.0.1" in port for port in service.get("ports", ())), name


def test_volumes_are_folders_that_the_image_prepares_for_its_user() -> None:
    named = {each.split(":")[0] for service in SERVICES.values() for each in service.get("volumes", ())}
    assert {each for each in named if not each.startswith(".")} == set(COMPOSE["volumes"])
    made = re.search(r"mkdir -p (.+?) \\", stages()["base"])
    assert made is not None
    for service in SERVERS.values():
        for volume in service["volumes"]:
            assert volume.split(":")[1] in made[1].split()
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]


# ---------------------------------------------------------------- systemd


def test_the_unit_starts_the_server_and_waits_for_its_drain() -> None:
    unit = configparser.RawConfigParser(strict=False, delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / "chorale.service").read_text("utf-8"))
    service = unit["Service"]
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert (program, command) == ("/opt/chorale/bin/chorale", "serve")
    recipe = "examples/recipes/gpt-oss-20b-1-gpu.yaml"
    assert recipe in (DEPLOY / "chorale.service").read_text("utf-8")
    place = arguments.index("--config") + 1
    arguments[place] = str(ROOT / recipe)
    key_file = arguments.index("--api-key-file")
    assert arguments[key_file + 1] == "%d/api-keys"
    del arguments[key_file : key_file + 2]
    settings = parsed(arguments)
    assert settings.notices == ()
    assert float(service["TimeoutStopSec"]) >= settings.server.shutdown_timeout + DRAIN_SLACK
    assert service["KillMode"] == "mixed"  # engines end with the server
    assert service["RestartPreventExitStatus"] == "2"  # docs/reference/operating.md, "Exit codes"
    text = (DEPLOY / "chorale.service").read_text("utf-8")
    names = {
        name
        for line in re.findall(r"^Environment=(.+)$", text, re.MULTILINE)
        for name in re.findall(r"(\w+)=", line)
    }
    assert names <= KNOWN


# ---------------------------------------------------------------- Modal and SkyPilot


class Recorder:
    """Replaces objects of the package modal: every attribute and call returns the recorder."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        [function] = arguments[:1] or [None]
        return function if isinstance(function, types.FunctionType) else self


def modal_app(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    stand_in = types.ModuleType("modal")
    for name in ("Image", "Volume", "Secret", "App", "concurrent", "web_server", "is_local"):
        setattr(stand_in, name, Recorder())
    monkeypatch.setitem(sys.modules, "modal", stand_in)
    return runpy.run_path(str(DEPLOY / "modal_app.py"))


def test_modal_serves_what_the_client_of_the_guide_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    app = modal_app(monkeypatch)
    program, command, *arguments = app["command"]()
    assert (program, command) == ("chorale", "serve")
    settings: Settings = merge(arguments, {})
    assert settings.notices == ()
    assert settings.server.served_model_names == ("openai/gpt-oss-20b", "llm")
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", app["PORT"])
    assert app["PORT"] == 8000
    assert settings.engine.speculative_config is not None
    assert settings.engine.max_num_seqs == app["MAX_INPUTS"]
    started: list[list[str]] = []
    monkeypatch.setattr("subprocess.Popen", started.append)
    app["serve"]()
    assert started == [app["command"]()]


def test_modal_compiles_kernels_for_the_options_that_it_serves_with(monkeypatch: pytest.MonkeyPatch) -> None:
    app = modal_app(monkeypatch)
    program, command, *arguments = shlex.split(app["warm_command"]())
    assert (program, command) == ("chorale", "warm")
    rest, names = warm.take_gpus(arguments)
    built = merge(rest, {}).engine
    assert [find_gpu(name).name for name in names] == [app["GPU"]]
    warm.check(built, names)
    served = merge(app["command"]()[2:], {}).engine
    for option in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "kv_cache_dtype"):
        assert getattr(built, option) == getattr(served, option)


def test_skypilot_starts_a_server_and_asks_whether_it_is_ready() -> None:
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text("utf-8"))
    command = task["run"].replace("\\\n", " ").replace("$MODEL", task["envs"]["MODEL"])
    words = shlex.split(command.replace("$SKYPILOT_NUM_GPUS_PER_NODE", "1"))
    assert words[:3] == ["exec", "~/chorale/bin/chorale", "serve"]
    settings = parsed(words[3:])
    assert settings.notices == ()
    assert settings.server.port == task["resources"]["ports"]
    assert task["service"]["readiness_probe"]["path"] == "/ready"
    assert set(task["secrets"]) <= KNOWN
    assert all(value is None for value in task["secrets"].values())
    for accelerator in task["resources"]["accelerators"]:
        find_gpu(accelerator.partition(":")[0])


@pytest.mark.parametrize("name", ["demo", "gpt-oss-20b", "gpt-oss-120b"])
def test_the_files_for_ray_contain_no_url(name: str) -> None:
    config = yaml.safe_load((DEPLOY / "ray" / f"{name}.yaml").read_text("utf-8"))
    [application] = config["applications"]
    assert "://" not in str(application["args"])
