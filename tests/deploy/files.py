"""The files of ``deploy/``: their objects, and their command lines as the real parser reads them."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import yaml

from chorale.config.options.flags import FLAGS
from chorale.config.options.settings import Settings, merge
from tests.support import ROOT

DEPLOY = ROOT / "deploy"
TESTS = ROOT / "tests" / "deploy"
MANIFESTS = (
    *sorted((DEPLOY / "kubernetes").glob("*.yaml")),
    DEPLOY / "kserve.yaml",
    *sorted((TESTS / "rendered").glob("*.yaml")),
)
NOT_OBJECTS = ("kustomization.yaml", "prometheus-adapter-values.yaml")
DRAIN_SLACK = 15.0  # seconds for load balancers, and to write the last events

# Variables that files of deploy/ set and that libraries, drivers or the shell read, not Chorale.
LIBRARIES = {
    *(
        "EXA_API_KEY", "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN", "HOME", "PATH", "PGPASSWORD",
        "PYTHONUNBUFFERED",
    ),
    *("NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_VISIBLE_DEVICES", "TRITON_CACHE_DIR"),
    *("XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"),
}  # fmt: skip
KNOWN = {name for flag in FLAGS.values() for name in flag.environment} | LIBRARIES


DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")


def exec_form(instruction: str) -> list[str]:
    """Returns the words of ENTRYPOINT or CMD of the image."""
    found = re.search(rf"^{instruction} (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found is not None
    return list(json.loads(found[1]))


def load_script(name: str) -> Any:
    """Imports a program of ``scripts/``."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Source(NamedTuple):
    """A Kubernetes object and its file."""

    file: str
    content: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.content["kind"])

    @property
    def name(self) -> str:
        return str(self.content["metadata"]["name"])


def objects() -> list[Source]:
    """Returns all Kubernetes objects of the manifests and of the rendered chart."""
    return [
        Source(path.name if "rendered" not in path.parts else f"rendered/{path.name}", each)
        for path in MANIFESTS
        if path.name not in NOT_OBJECTS
        for each in yaml.load_all(
            path.read_text("utf-8"), yaml.CSafeLoader
        )  # each worker of a run reads them
    ]


class Pod(NamedTuple):
    """A pod of a server, with the container that runs Chorale."""

    file: str
    spec: dict[str, Any]
    labels: dict[str, str]
    container: dict[str, Any]

    def settings(self) -> Settings:
        """Returns the parsed command line, with keys from the environment instead of the key file."""
        command = self.container.get("command", exec_form("ENTRYPOINT"))
        assert command[:4] == ["tini", "--", "chorale", "serve"]
        return parsed([*command[4:], *self.container["args"]])


def parsed(arguments: list[str]) -> Settings:
    """Parses the arguments after ``chorale serve``, for a server whose keys are in the environment."""
    kept = [each for each in arguments if not each.startswith("--api-key-file")]
    return merge([each.replace("{{.Name}}", "name") for each in kept], {"CHORALE_API_KEY": "secret"})


def pods() -> Iterator[Pod]:
    for source in objects():
        spec = source.content.get("spec", {})
        template = spec.get("template", {})
        inner = template.get("spec", template if source.kind.startswith("LLM") else spec)
        for container in inner.get("containers", ()):
            if container["name"] in ("chorale", "kserve-container", "main"):
                labels = template.get("metadata", {}).get("labels", {})
                yield Pod(f"{source.file}: {source.kind}", inner, labels, container)


@functools.cache
def schemas() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the schemas of Kubernetes, and those of custom resources."""
    own = json.loads((TESTS / "schemas" / "kubernetes.json").read_text("utf-8"))
    return own, yaml.safe_load((TESTS / "schemas" / "custom.yaml").read_text("utf-8"))


def faults(content: dict[str, Any], kind: str | None = None) -> list[str]:
    """Returns the violations of the schema for an object's kind, or that there is no schema."""
    own, custom = schemas()
    kind = kind or f"{content['apiVersion']}/{content['kind']}"
    if kind in own["kinds"]:
        schema = {"$ref": f"#/definitions/{own['kinds'][kind]}", "definitions": own["definitions"]}
    elif kind in custom["kinds"]:
        schema = {
            "definitions": custom["definitions"],
            "additionalProperties": False,
            "required": ["spec"],
            "properties": {
                "apiVersion": {"type": "string"},
                "kind": {"type": "string"},
                "metadata": {"$ref": "#/definitions/metadata"},
                "spec": custom["kinds"][kind],
            },
        }
    else:
        return [f"no schema for {kind}"]
    validator = jsonschema.Draft202012Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(content)]
