"""``make mutants`` on a small repository whose faults and tests are known."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

SCRIPT = ROOT / "scripts" / "mutants"
SOURCE = '''"""A module with a tested and a half tested function, and one that another test file calls."""

LIMIT = 3


def clamp(number: int) -> int:
    return LIMIT if number > LIMIT else number


def total(numbers: list[int]) -> int:
    result = 0
    for number in numbers:
        result += number
    return result


def doubled(number: int) -> int:
    return number * 2


SIZES = (1, 2)
'''
TESTS = """from small.sums import clamp, total


def test_clamp() -> None:
    assert [clamp(each) for each in (2, 3, 4)] == [2, 3, 3]


def test_total() -> None:
    total([])  # asserts nothing
"""
# Imports nothing by name: only the table knows that it belongs to the package.
OTHER = """import importlib


def test_doubled() -> None:
    assert importlib.import_module("small" + ".sums").doubled(3) == 6


def test_sizes() -> None:  # executes no line of the module
    assert importlib.import_module("small" + ".sums").SIZES == (1, 2)
"""
# How pytest is started here is part of what is tested: its plugins and warnings as errors.
OPTIONS = re.search(
    r"^\[tool\.pytest.*?(?=^\[)", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE
)
TABLE = "<!-- tests -->\n| `small/` | `tests/test_other.py` |\n<!-- /tests -->\n"


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    assert OPTIONS is not None
    for name, text in (
        ("small/__init__.py", ""),
        ("small/sums.py", SOURCE),
        ("tests/test_sums.py", TESTS),
        ("tests/test_other.py", OTHER),
        ("CONTRIBUTING.md", TABLE),
        ("pyproject.toml", OPTIONS[0]),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "all")
    return tmp_path


def mutants(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--root", str(repository), "--package", "small", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=repository)


def lines(output: str, word: str) -> list[str]:
    """The mutants of the run with this verdict, without the repetition below the summary."""
    return [line for line in output.partition("\n\n")[0].splitlines() if line.startswith(word)]


def test_every_kind_of_verdict(repository: Path) -> None:
    done = mutants(repository, "small/sums.py")
    assert done.returncode == 0, done.stdout + done.stderr
    killed, survived = lines(done.stdout, "killed"), lines(done.stdout, "survived")
    assert any("small/sums.py:3 " in line and "3 -> 4" in line for line in killed), done.stdout
    assert any("small/sums.py:7 " in line and "test_sums.py::test_clamp" in line for line in killed)
    # The limit itself gives the same number on either side of the comparison: an equivalent mutant.
    assert any("small/sums.py:7 " in line and "> -> >=" in line for line in survived)
    assert {line.split()[1] for line in survived} == {f"small/sums.py:{n}" for n in (7, 11, 14)}
    untested = lines(done.stdout, "untested")
    assert {line.split()[1] for line in untested} == {"small/sums.py:13"}
    assert any("small/sums.py:21 " in line and "test_other.py::test_sizes" in line for line in killed)
    assert any("small/sums.py:18 " in line and "test_other.py::test_doubled" in line for line in killed)
    assert (repository / "small/sums.py").read_text() == SOURCE


def test_only_functions_that_changed(repository: Path) -> None:
    changed = SOURCE.replace("    result = 0", "    result = int()\n    result += 0")
    (repository / "small/sums.py").write_text(changed)
    done = mutants(repository, "--since", "HEAD")
    found = {
        line.split()[1] for word in ("killed", "survived", "untested") for line in lines(done.stdout, word)
    }
    assert found == {f"small/sums.py:{n}" for n in (12, 14, 15)}, done.stdout + done.stderr
