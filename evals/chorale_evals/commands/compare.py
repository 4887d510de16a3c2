"""``chorale eval compare A B``: compares two runs sample by sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from chorale.cli.parser import Parser
from chorale.errors import ChoraleError
from chorale_evals.commands.table import grid
from chorale_evals.comparison import Paired, paired
from chorale_evals.journal import read_journal
from chorale_evals.manifest import Manifest, read_manifest

_SHOWN = 20


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
    manifests = [read_manifest(folder) for folder in (given.first, given.second)]
    found = paired(read_journal(given.first, whole=False), read_journal(given.second, whole=False))
    if not found:
        raise ChoraleError("the runs have no sample in common (the same task and effort)")
    if given.json:
        print(json.dumps([_json(one) for one in found], ensure_ascii=False))
        return 0
    for line in differences(manifests):
        print(line)
    print("\n".join(table(found)))
    for one in found:
        print("\n".join(samples(one, None if given.all else _SHOWN)))
    return 0


def differences(manifests: Sequence[Manifest | None]) -> list[str]:
    """Returns a line per difference of the settings, and of the versions of a task."""
    first, second = manifests
    if first is None or second is None:
        return []
    both = [name for name in first.tasks if name in second.tasks]
    values = [
        {name: one.settings.get(name) for name in {**first.settings, **second.settings}}
        | {f"version of {name}": one.tasks[name].version for name in both}
        | {f"data of {name}": one.tasks[name].data_revision for name in both}
        for one in (first, second)
    ]
    return [
        f"{name}: A {value if value is not None else '-'}, B {other if other is not None else '-'}"
        for (name, value), other in zip(values[0].items(), values[1].values(), strict=True)
        if value != other
    ]


def table(found: Sequence[Paired]) -> list[str]:
    rows = [["task", "effort", "n", "A", "B", "B - A", "95 % interval", "better", "worse", "p"]]
    for one in found:
        change = one.difference
        interval = f"{100 * change.low:+.1f} to {100 * change.high:+.1f}"
        rows.append(
            [
                one.task, one.effort, str(len(one.pairs)), f"{100 * one.first:.1f}",
                f"{100 * one.second:.1f}", f"{100 * change.mean:+.1f}", interval,
                str(one.better), str(one.worse), f"{one.p_value:.2g}",
            ]
        )  # fmt: skip
    return grid(rows)


def samples(one: Paired, most: int | None) -> list[str]:
    """Returns a line per sample that differs, and a verdict."""
    where = f"{one.task} {one.effort}"
    said = "differ" if one.p_value < 0.05 else "do not differ significantly"
    shown = ["", f"{where}: the runs {said} (p {one.p_value:.2g}, exact McNemar)"]
    if one.alone:
        shown.append(f"{one.alone} samples are in one run only and left out")
    differing = one.differing[:most]
    shown += [f"  {pair.sample}: {pair.first:g} -> {pair.second:g}" for pair in differing]
    if len(differing) < len(one.differing):
        shown.append(f"  and {len(one.differing) - len(differing)} more (--all)")
    return shown


def _json(one: Paired) -> dict[str, object]:
    return {
        "task": one.task, "effort": one.effort, "samples": len(one.pairs), "first": one.first,
        "second": one.second, "difference": asdict(one.difference), "better": one.better, "worse": one.worse,
        "p_value": one.p_value, "alone": one.alone, "differing": [asdict(pair) for pair in one.differing],
    }  # fmt: skip
