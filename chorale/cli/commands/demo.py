"""``chorale demo export DIR``: writes the demo checkpoint as a folder that other engines can load."""

from __future__ import annotations

from pathlib import Path

from chorale.cli.options.help import wants_help
from chorale.cli.words import subcommand
from chorale.errors import ConfigError

USAGE = "usage: chorale demo export DIR"


def run(arguments: list[str]) -> int:
    if not arguments or wants_help(arguments):
        print(USAGE)
        return 0
    if arguments[0] != "export":
        raise subcommand(arguments[0], ("export",), "demo command", USAGE)
    if len(arguments) != 2:
        raise ConfigError(f"expected: export DIR; {USAGE}")
    if arguments[1].startswith("-"):
        raise ConfigError(f"{arguments[1]} is not a folder; {USAGE}")
    from chorale.demo import export_demo

    try:
        print(f"wrote {export_demo(Path(arguments[1]))}")
    except OSError as error:
        raise ConfigError(f"cannot export: {error}") from None
    return 0
