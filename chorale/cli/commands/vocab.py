"""``chorale vocab export DIR``: writes ``o200k_base.tiktoken`` for tools that would otherwise download it."""

from __future__ import annotations

from pathlib import Path

from chorale.cli.options.help import wants_help
from chorale.cli.words import subcommand
from chorale.errors import ConfigError

USAGE = "usage: chorale vocab export DIR"


def run(arguments: list[str]) -> int:
    if not arguments or wants_help(arguments):
        print(USAGE)
        return 0
    if arguments[0] != "export":
        raise subcommand(arguments[0], ("export",), "vocab command", USAGE)
    if len(arguments) != 2:
        raise ConfigError(f"expected: export DIR; {USAGE}")
    if arguments[1].startswith("-"):
        raise ConfigError(f"{arguments[1]} is not a folder; {USAGE}")
    from chorale.harmony.vocab import export_vocabulary

    path = export_vocabulary(Path(arguments[1]))
    print(f"wrote {path}")
    print(f"other harmony tools find it with: export TIKTOKEN_ENCODINGS_BASE={Path(path).parent}")
    return 0
