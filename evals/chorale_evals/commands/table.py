"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence

from chorale_evals.commands.progress import short
from chorale_evals.summary import Tally

HEAD = ("task", "effort", "n", "repeats", "score", "95 % interval", "cut", "tokens in", "tokens out")


def grid(rows: Sequence[Sequence[str]], left: int = 2) -> list[str]:
    """Returns lines with aligned columns, the first ``left`` of them aligned to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def lines(tallies: Sequence[Tally]) -> list[str]:
    """Returns the table, then breakdowns and problems."""
    shown = grid([HEAD, *(_row(tally) for tally in tallies)])
    for tally in tallies:
        where = f"{tally.task.name} {tally.effort}"
        if breakdowns := tally.task.breakdowns(tally.groups):
            cells = [
                [one.name or "(no group)", f"{100 * one.score:.1f}", str(one.count)] for one in breakdowns
            ]
            shown += ["", f"{where}, by group:", *("  " + line for line in grid(cells, left=1))]
        shown += [f"{where}: {trouble}" for trouble in _troubles(tally)]
    return shown


def _row(tally: Tally) -> list[str]:
    interval = tally.interval
    known = tally.mean is not None
    return [
        tally.task.name, tally.effort, str(len(tally.task.samples)), str(tally.task.repeats),
        f"{100 * (tally.mean or 0):.1f} %" if known else "-",
        f"{100 * interval.low:.1f} to {100 * interval.high:.1f}" if known else "-",
        str(tally.num_cut), short(tally.usage.input), short(tally.usage.output),
    ]  # fmt: skip


def _troubles(tally: Tally) -> list[str]:
    missing = tally.total - tally.num_done
    found = [
        (tally.num_failed, "failed and are not scored; run the same command again to repeat them"),
        (tally.num_refused, "were refused by the server and count as wrong"),
        (missing, "were not asked yet"),
    ]
    said = [f"{count} of {tally.total} {what}" for count, what in found if count]
    if len(tally.fingerprints) > 1:
        said.append(f"the answers are from {len(tally.fingerprints)} configurations of the server")
    return said
