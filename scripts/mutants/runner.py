"""Tries a mutant in a copy of the tree: writes the fault, runs the tests of its line, restores the file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean

from coverage_map import QUIET, CoverageMap, environment_of
from operators import Edit


@dataclass(frozen=True, slots=True)
class Mutant:
    file: str
    edit: Edit
    source: str = field(repr=False)

    def __str__(self) -> str:
        old = " ".join(self.source[self.edit.start : self.edit.end].split())
        line = self.source.splitlines()[self.edit.line - 1].strip()
        return (
            f"{self.file}:{self.edit.line}  {_short(old)} -> {_short(self.edit.text)}  in: {_short(line, 70)}"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    word: str  # killed, survived, or untested (no test executes the line)
    seconds: float
    reason: str

    def __str__(self) -> str:
        return f"{self.word:9}{self.mutant}  ({self.reason})"


def try_mutant(copy: Path, mutant: Mutant, covered: CoverageMap, budget: float, all_tests: bool) -> Verdict:
    """Returns the verdict. ``all_tests``: run all tests if none executes the line in its own process."""
    tests = _tests(mutant, covered, budget, all_tests)
    if not tests:
        return Verdict(mutant, "untested", 0.0, "no test executes this line")
    path = copy / mutant.file
    path.write_text(mutant.edit.apply(mutant.source), "utf-8")
    started = time.monotonic()
    try:
        word, reason = _judge(copy, tests, 30 + 10 * sum(covered.seconds[each] for each in tests))
    finally:
        path.write_text(mutant.source, "utf-8")
    return Verdict(mutant, word, time.monotonic() - started, reason)


def _tests(mutant: Mutant, covered: CoverageMap, budget: float, all_tests: bool) -> list[str]:
    """Returns tests of the mutant's lines, the fastest file first, for ``budget`` seconds in total.

    Code that runs on import is executed before the first test, so that every test may see it: those that
    import the file come first, then the others.
    """
    near = covered.files.get(mutant.file, set())
    if mutant.edit.at_import:
        found = set(covered.seconds)
    else:
        found = covered.tests_of(mutant.file, mutant.edit.line, mutant.edit.last_line)
    if not found and all_tests:
        found = set(covered.seconds)
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in sorted(found, key=lambda each: (covered.seconds[each], each)):
        by_file[test.partition("::")[0]].append(test)
    # File by file, so that fixtures of a file are created once.
    files = sorted(
        by_file.values(),
        key=lambda each: (near.isdisjoint(each), fmean(covered.seconds[test] for test in each), each),
    )
    chosen, total = [], 0.0
    for test in chain.from_iterable(files):
        total += covered.seconds[test]
        if chosen and total > budget:
            break
        chosen.append(test)
    return chosen


def _judge(copy: Path, tests: list[str], limit: float) -> tuple[str, str]:
    listed = copy / ".mutants-tests"
    listed.write_text("\n".join(tests))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "--no-header",
        "--tb=no",
        "-rfE",
        *QUIET,
        f"@{listed.name}",
    ]
    # A new session, so that pytest's process group can be killed; the tests' reaper ends other processes.
    process = subprocess.Popen(command, cwd=copy, env=environment_of(copy), start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return "killed", f"did not end within {limit:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode == 0:
        return "survived", f"{len(tests)} test{'s' * (len(tests) != 1)}"
    failed = [line.split(" ")[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return "killed", failed[0] if failed else f"pytest ended with {process.returncode}"


def _short(text: str, length: int = 40) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
