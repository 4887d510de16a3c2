"""``chorale eval``: finds the subcommand. Any other first word is a task."""

from __future__ import annotations

from pathlib import Path

from chorale.config.options.parser import Parser
from chorale_evals.commands import parity, run
from chorale_evals.report.page import write_report


def main(arguments: list[str]) -> int:
    """Returns the exit code. Called by the command ``chorale``, which prints errors."""
    if arguments[:1] == ["parity"]:
        return parity.run(arguments[1:])
    if arguments[:1] == ["report"]:
        return _report(arguments[1:])
    return run.run(arguments)


def _report(arguments: list[str]) -> int:
    """``chorale eval report DIR``: writes the report page of a run again."""
    parser = Parser(
        "chorale eval report",
        usage="chorale eval report DIR",
        description="Write the page with every answer of a run, which may be unfinished.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder given as --out of the run")
    print(write_report(parser.read(arguments).folder))
    return 0
