"""Maps lines to the tests that execute them, measured by one run of the tests of the changed files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from coverage import CoverageData

HERE = Path(__file__).resolve().parent
TABLE = "CONTRIBUTING.md"
FEW = 8  # at most this many importing test files count as a module's tests
_ROW = re.compile(r"^\| `([\w/.]+)`[^|]*\|([^|]+)\|", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CoverageMap:
    seconds: dict[str, float]  # duration of each test that passes
    failed: list[str]
    lines: dict[tuple[str, int], set[str]] = field(repr=False)  # (file, line) -> tests
    files: dict[str, set[str]] = field(repr=False)  # file -> tests that import it by name or execute a line

    def tests_of(self, file: str, first: int, last: int) -> set[str]:
        found: set[str] = set()
        for line in range(first, last + 1):
            found |= self.lines.get((file, line), set())
        return found


def table(root: Path) -> dict[str, list[str]]:
    """Returns the table of ``CONTRIBUTING.md``: path of the product -> paths of tests."""
    page = root / TABLE
    text = page.read_text("utf-8") if page.exists() else ""
    section = text.partition("<!-- tests -->")[2].partition("<!-- /tests -->")[0]
    return {row[1]: re.findall(r"`(tests/[\w/.]+)`", row[2]) for row in _ROW.finditer(section)}


def tests_for(root: Path, files: list[str]) -> list[str]:
    """Returns the tests of ``files``: the table's tests for the longest matching path, and importing tests.

    For a file that more than ``FEW`` test files import (``errors.py``), only the table counts.
    """
    rows = table(root)
    chosen: set[str] = set()
    for file in files:
        matches = [path for path in rows if file.startswith(path)]
        if matches:
            chosen.update(rows[max(matches, key=len)])
        importing = _importing(root, file)
        if not matches or len(importing) <= FEW:
            chosen.update(importing)
    folders = tuple(f"{each}/" for each in chosen if not each.endswith(".py"))
    return sorted(each for each in chosen if not each.startswith(folders) and (root / each).exists())


def _importing(root: Path, file: str) -> list[str]:
    module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package, _, name = module.rpartition(".")
    imports = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
    tests = sorted((root / "tests").rglob("test_*.py"))
    return [str(each.relative_to(root)) for each in tests if imports.search(each.read_text("utf-8"))]


def measure(root: Path, files: list[str], tests: list[str]) -> CoverageMap:
    """Runs ``tests`` in ``root`` once. Raises ``SystemExit`` if pytest cannot run them."""
    data, times = root / ".mutants-coverage", root / ".mutants-times"
    environment = environment_of(root) | {"MUTANTS_TIMES": str(times)}
    command = [sys.executable, "-m", "coverage", "run", f"--data-file={data}", "--rcfile=/dev/null"]
    command += [f"--include={','.join(files)}", "-m", "pytest", "-p", "contexts", *QUIET, *tests]
    print(f"running {len(tests)} test paths once: {' '.join(tests)}", flush=True)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    # pytest also exits with 1 after a warning at start-up; then no test has run.
    if done.returncode not in (0, 1) or not times.exists():
        raise SystemExit(f"the tests do not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    recorded = CoverageData(str(data))
    recorded.read()
    noted = json.loads(times.read_text())
    lines: dict[tuple[str, int], set[str]] = defaultdict(set)
    by_file: dict[str, set[str]] = defaultdict(set)
    for measured in recorded.measured_files():
        file = str(Path(measured).resolve().relative_to(root))
        for line, contexts in recorded.contexts_by_lineno(measured).items():
            passing = {each for each in contexts if each in noted["passed"]}
            lines[file, line] |= passing
            by_file[file] |= passing
    for file in files:
        importing = set(_importing(root, file))
        by_file[file] |= {test for test in noted["passed"] if test.partition("::")[0] in importing}
    return CoverageMap(noted["passed"], noted["failed"], dict(lines), dict(by_file))


# pyproject.toml's addopts name the plugins. A second -p for one of them is a warning, hence an error.
QUIET = ["-q", "-pno:cacheprovider", "-m", "not slow and not gpu"]


def environment_of(root: Path) -> dict[str, str]:
    """Returns an environment in which Python imports the package from ``root`` and writes no byte code."""
    path = os.pathsep.join([str(root), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    fixed = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return os.environ | fixed | {"PYTHONPATH": path}
