"""The evaluation's files: written by each run, and merged when several processes shared the work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Tables = dict[str, dict[str, Any]]  # run -> family -> check -> share


def markdown(tables: Tables) -> str:
    """Returns a table with a line per family and check, and a column per run."""
    lines = ["| family | check | cases | " + " | ".join(tables) + " |", "|---" * (3 + len(tables)) + "|"]
    for family, check in _rows(tables):
        values = [table.get(family, {}).get(check) for table in tables.values()]
        cells = [_cell(value, is_share=family != "analysis_tokens") for value in values]
        lines.append(f"| {family} | {check} | {_cases(tables, family, check)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rows(tables: Tables) -> list[tuple[str, str]]:
    """Returns every family and check of any run in the order of appearance, grouped by family."""
    checks: dict[str, dict[str, None]] = {}
    for table in tables.values():
        for family, found in table.items():
            checks.setdefault(family, {}).update(dict.fromkeys(c for c in found if not c.endswith("cases")))
    return [(family, check) for family, found in checks.items() for check in found]


def _cases(tables: Tables, family: str, check: str) -> str:
    """Returns the number of cases of a check; if splits differ, each number once."""
    counts = [
        checks.get(f"{check} cases", checks.get("cases"))
        for table in tables.values()
        if check in (checks := table.get(family, {}))
    ]
    return ", ".join(str(count) for count in dict.fromkeys(counts) if count is not None)


def _cell(value: float | None, *, is_share: bool) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if is_share else f"{value:g}"


def write(folder: Path, tables: Tables, failures: str) -> None:
    """Writes ``evaluation.json``, ``evaluation.md`` and ``failures.md`` (some wrong answers)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").write_text(json.dumps(tables, indent=1))
    (folder / "evaluation.md").write_text(markdown(tables) + "\n")
    (folder / "failures.md").write_text(failures)


def merge(folders: Sequence[Path], out: Path, order: Sequence[str]) -> Tables:
    """Merges separate runs to one table, in ``order`` (other runs come last).

    Raises ``ValueError`` if two folders contain the same run.
    """
    tables: Tables = {}
    for folder in folders:
        found = json.loads((folder / "evaluation.json").read_text())
        if twice := tables.keys() & found.keys():
            raise ValueError(f"{folder}: has {sorted(twice)}, which an earlier folder has too")
        tables |= found
    names = sorted(tables, key=lambda name: order.index(name) if name in order else len(order))
    merged = {name: tables[name] for name in names}
    write(out, merged, "\n\n".join((folder / "failures.md").read_text() for folder in folders))
    return merged
