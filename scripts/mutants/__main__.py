"""Mutation tests of changed functions: python scripts/mutants --since main~1, or FILE[:FUNCTION] ...

Makes small faults in the functions that changed, one at a time, in a copy of the tree, and runs the tests
that execute the faulty line. A fault that no test sees is printed as survived, with its file and line.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from changes import changed_lines, lines_of, widened
from coverage_map import CoverageMap, measure, tests_for
from operators import edits_of
from runner import Mutant, Verdict, try_mutant


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    root = Path(options.root).resolve()
    mutants = _mutants(root, options)
    if not mutants:
        print("nothing to mutate")
        return 0
    files = sorted({each.file for each in mutants})
    tests = options.tests or tests_for(root, files)
    if not tests:
        print(f"no tests belong to {', '.join(files)}; name some with --tests", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="chorale-mutants-") as folder:
        copies = [_copy(root, Path(folder).resolve() / str(number)) for number in range(options.jobs)]
        covered = measure(copies[0], files, tests)
        for test in covered.failed:
            print(f"left out, fails without a mutant: {test}")
        return _report(_run(copies, mutants, covered, options), options.floor)


def _mutants(root: Path, options: argparse.Namespace) -> list[Mutant]:
    """Returns the mutants in the order of the source, or with ``--limit`` a random sample of them."""
    wanted: dict[str, set[int] | None] = {}
    if options.since:
        for file, lines in changed_lines(root, options.since, options.package).items():
            if (root / file).exists():
                wanted[file] = widened((root / file).read_text("utf-8"), lines)
    for each in options.paths:
        file, _, function = each.partition(":")
        wanted[file] = lines_of((root / file).read_text("utf-8"), function) if function else None
    mutants = []
    for file, chosen in sorted(wanted.items()):
        source = (root / file).read_text("utf-8")
        mutants += [
            Mutant(file, edit, source)
            for edit in edits_of(source)
            if chosen is None or not chosen.isdisjoint(range(edit.line, edit.last_line + 1))
        ]
    if options.limit and len(mutants) > options.limit:
        print(f"{len(mutants)} mutants, of which {options.limit} are tried (--limit)")
        kept = sorted(random.Random(options.seed).sample(range(len(mutants)), options.limit))
        mutants = [mutants[each] for each in kept]
    return mutants


def _copy(root: Path, target: Path) -> Path:
    """Copies the files that git tracks or would add, so that the tree itself stays unchanged."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    return target


def _run(
    copies: list[Path], mutants: list[Mutant], covered: CoverageMap, options: argparse.Namespace
) -> list[Verdict]:
    idle: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        idle.put(copy)

    def one(mutant: Mutant) -> Verdict:
        copy = idle.get()
        try:
            return try_mutant(copy, mutant, covered, options.budget, options.all_tests)
        finally:
            idle.put(copy)

    verdicts = []
    with ThreadPoolExecutor(len(copies)) as pool:
        # One thread prints: print() writes the newline separately, so lines of several threads would mix.
        for verdict in pool.map(one, mutants):
            print(verdict, flush=True)
            verdicts.append(verdict)
    return verdicts


def _report(verdicts: list[Verdict], floor: float) -> int:
    counts = {
        word: sum(each.word == word for each in verdicts) for word in ("killed", "survived", "untested")
    }
    share = 100 * counts["killed"] / len(verdicts)
    print(f"\n{len(verdicts)} mutants: {', '.join(f'{count} {word}' for word, count in counts.items())}; "
          f"{share:.1f} % killed, {sum(each.seconds for each in verdicts):.0f} s of tests")  # fmt: skip
    for verdict in verdicts:
        if verdict.word != "killed":
            print(verdict)
    return int(share < floor)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="FILE[:FUNCTION]", help="files to mutate as a whole")
    parser.add_argument(
        "--since", metavar="COMMIT", help="mutate the functions that changed since this commit"
    )
    parser.add_argument("--tests", nargs="+", help="tests to choose from, instead of CONTRIBUTING.md's table")
    parser.add_argument("--all-tests", action="store_true",
                        help="run all tests for lines that only child processes execute")  # fmt: skip
    parser.add_argument("--limit", type=int, default=0, help="maximum number of mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample for --limit")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at a time")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for one mutant")
    parser.add_argument(
        "--floor", type=float, default=0.0, help="exit with 1 below this percentage of killed mutants"
    )
    parser.add_argument("--package", default="chorale", help="the folder whose changes count")
    parser.add_argument("--root", default=".", help="root of the repository")
    return parser


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s in all")
    sys.exit(code)
