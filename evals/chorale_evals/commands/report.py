"""``chorale eval report DIR``: writes the report page of a run again."""

from __future__ import annotations

from pathlib import Path

from chorale.config.options.parser import Parser
from chorale_evals.report.page import write_report


def parser() -> Parser:
    made = Parser(
        "chorale eval report",
        usage="chorale eval report DIR",
        description="Write the page with every answer of a run, which may be unfinished.",
    )
    made.add_argument("folder", type=Path, metavar="DIR", help="folder given as --out of the run")
    return made


def run(arguments: list[str]) -> int:
    given = parser().read(arguments)
    print(write_report(given.folder))
    return 0
