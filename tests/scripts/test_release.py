"""The workflow of a release names files that exist, publishes without a stored key, and has all platforms."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml

from tests.support import ROOT

TEXT = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
WORKFLOW: dict[Any, Any] = yaml.safe_load(TEXT)
JOBS = WORKFLOW["jobs"]


def test_a_release_is_made_of_tags_only() -> None:
    assert WORKFLOW[True] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+*"]}}  # YAML reads "on" as true
    assert WORKFLOW["permissions"] == {"contents": "read"}


def test_wheels_are_built_for_three_platforms_and_tried() -> None:
    wheel = JOBS["wheel"]
    assert len(wheel["strategy"]["matrix"]["runner"]) == 3
    runs = " ".join(step.get("run", "") for step in wheel["steps"])
    assert "scripts/try_wheel.sh" in runs
    assert "scripts/sbom.sh" in runs


def test_uploads_use_a_trusted_publisher() -> None:
    assert JOBS["publish"]["permissions"]["id-token"] == "write"
    assert JOBS["publish"]["environment"] == "pypi"
    assert not re.search(r"secrets\.", TEXT)


def test_scripts_and_files_of_the_workflow_exist() -> None:
    for name in re.findall(r"\b((?:scripts|deploy)/[\w.]+)", TEXT):
        assert (ROOT / name).exists(), name


def test_the_image_has_the_files_from_which_the_wheel_is_built() -> None:
    """Without the build hook's file, the build of the wheel in the image fails."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed.add(project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["path"])
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
    copied = re.search(r"^COPY (pyproject.toml .*) \./$", dockerfile, re.MULTILINE)
    assert copied is not None
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    for name in needed:
        assert name in copied[1].split(), name
        assert f"!{name}" in ignored, name


def test_the_changelog_has_a_section_for_the_release_page() -> None:
    """The workflow cuts the lines between "## VERSION" and the next "## "."""
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert sections
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", name) for name in sections)
    assert len(sections) == len(set(sections))
