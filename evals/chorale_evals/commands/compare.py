"""``chorale eval compare A B``: compares two runs sample by sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from chorale.config.options.parser import Parser
from chorale.errors import ChoraleError
from chorale_evals.commands.table import grid
from chorale_evals.comparison import Paired, paired
from chorale_evals.journal import read_journal
from chorale_evals.manifest import differences, read_manifest

_SHOWN = 20
_HEAD = ["task", "effort", "n", "A", "B", "B - A", "95 % interval", "better", "worse", "p"]


def parser() -> Parser:
    made = Parser(
        "chorale eval compare",
        usage="chorale eval compare A B [options]",
        description="Compare two runs over the samples that both have answered: mean difference with its "
        "interval, exact McNemar test, and the samples that differ.",
    )
    made.add_argument("first", type=Path, metavar="A", help="folder of the first run")
    made.add_argument("second", type=Path, metavar="B", help="folder of the second run")
    made.add_argument(
        "--all", action="store_true", help=f"list all samples that differ, not the first {_SHOWN}"
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(arguments: list[str]) -> int:
    given = parser().read(arguments)
    found = paired(read_journal(given.first), read_journal(given.second))
    if not found:
        raise ChoraleError("the runs have no sample in common (the same task and effort)")
    if given.json:
        print(json.dumps([asdict(one) for one in found], ensure_ascii=False))
        return 0
    manifests = read_manifest(given.first), read_manifest(given.second)
    if manifests[0] and manifests[1]:
        for name, one, other in differences(*manifests):  # type: ignore[arg-type]
            print(f"{name}: A {'-' if one is None else one}, B {'-' if other is None else other}")
    print("\n".join(grid([_HEAD, *map(_row, found)])))
    for each in found:
        print("\n".join(_samples(each, None if given.all else _SHOWN)))
    return 0


def _row(one: Paired) -> list[str]:
    change, (first, second) = one.difference, one.means
    interval = f"{100 * change.low:+.1f} to {100 * change.high:+.1f}"
    scores = [f"{100 * first:.1f}", f"{100 * second:.1f}", f"{100 * change.mean:+.1f}", interval]
    counts = [str(one.better), str(one.worse), f"{one.p_value:.2g}"]
    return [one.task, one.effort, str(len(one.pairs)), *scores, *counts]


def _samples(one: Paired, most: int | None) -> Iterator[str]:
    """Yields a verdict, and a line per sample that differs."""
    said = "differ" if one.p_value < 0.05 else "do not differ significantly"
    yield ""
    yield f"{one.task} {one.effort}: the runs {said} (p {one.p_value:.2g}, exact McNemar)"
    if one.alone:
        yield f"{one.alone} samples are in one run only and left out"
    for sample, (first, second) in islice(one.differing.items(), most):
        yield f"  {sample}: {first:g} -> {second:g}"
    if most is not None and len(one.differing) > most:
        yield f"  and {len(one.differing) - most} more (--all)"
