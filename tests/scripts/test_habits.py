"""The hooks of pre-commit, the workflow of the host, and the rule for commit subjects."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SUBJECT = ROOT / "scripts" / "commit_subject.py"
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
HOOKS = [
    hook
    for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    for hook in repository["hooks"]
]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("api: keep CORS headers on errors\n\nA page of an allowed origin ...", None),
        ("kernels/moe: one loop less", None),
        ("Merge branch 'x'", None),
        ("# a comment\napi: x", None),
        ("Keep CORS headers on errors", "area"),
        (f"api: {'x' * 68}", "73 characters"),
        ("api: keep CORS headers.", "full stop"),
        ("api: x\nand more", "second line"),
        ("", "area"),
    ],
)
def test_commit_subjects(tmp_path: Path, message: str, expected: str | None) -> None:
    (tmp_path / "message").write_text(message)
    command = [sys.executable, str(SUBJECT), str(tmp_path / "message")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (expected is None), done.stderr
    assert (expected or "") in done.stderr


def words(command: str) -> list[str]:
    return [word.removeprefix("./") for word in command.split()]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: str(hook["id"]))
def test_a_hook_runs_a_tool_that_there_is(hook: dict[str, Any]) -> None:
    assert hook["language"] == "system"
    program, *rest = words(hook["entry"])
    if program == "make":
        assert rest[0] in TARGETS
    elif program.endswith("/python"):
        assert (ROOT / rest[0]).exists()
    else:
        module = program.removeprefix(".venv/bin/")
        assert importlib.util.find_spec(module) or any(
            re.match(rf"{module}\b", each) for each in _requirements("dev")
        )


def test_the_workflow_runs_on_each_version_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert WORKFLOW["jobs"]["linux"]["strategy"]["matrix"]["python"] == named
    assert WORKFLOW["jobs"]["wheel"]["strategy"]["matrix"]["python"] == named


def test_the_workflow_calls_targets_and_files_that_there_are() -> None:
    for name, job in WORKFLOW["jobs"].items():
        assert "timeout-minutes" in job, name
        for step in job["steps"]:
            for line in step.get("run", "").splitlines():
                for target in re.findall(r"\bmake ([a-z-]+)", line):
                    assert target in TARGETS, (name, line)
                for path in re.findall(r"\b((?:scripts|tests|examples)/[\w./-]+)", line):
                    assert (ROOT / path).exists(), (name, line)


def _requirements(extra: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return list(project["optional-dependencies"][extra])
