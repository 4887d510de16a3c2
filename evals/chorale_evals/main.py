"""``chorale eval``: finds the subcommand. Any other first word is a task."""

from __future__ import annotations

import importlib

SUBCOMMANDS = ("parity", "report")


def run(arguments: list[str]) -> int:
    """Returns the exit code. Called by the command ``chorale``, which prints errors."""
    name, rest = "run", arguments
    if arguments and arguments[0] in SUBCOMMANDS:
        name, rest = arguments[0], arguments[1:]
    return int(importlib.import_module(f"chorale_evals.commands.{name}").run(rest))
