"""``chorale vocab export DIR`` and ``chorale demo export DIR``: files of the package for other tools."""

from __future__ import annotations

from pathlib import Path

from chorale.config.options.help import wants_help
from chorale.config.suggestions import subcommand
from chorale.errors import ConfigError


def run_vocab(arguments: list[str]) -> int:
    """Writes ``o200k_base.tiktoken`` for tools that would otherwise download it."""
    folder = _folder("vocab", arguments)
    if folder is not None:
        from chorale.harmony.vocab import export_vocabulary

        path = export_vocabulary(folder)
        print(f"wrote {path}")
        print(f"other harmony tools find it with: export TIKTOKEN_ENCODINGS_BASE={Path(path).parent}")
    return 0


def run_demo(arguments: list[str]) -> int:
    """Writes the demo checkpoint as a folder that other engines can load."""
    folder = _folder("demo", arguments)
    if folder is not None:
        from chorale.model.demo import export_demo

        try:
            print(f"wrote {export_demo(folder)}")
        except OSError as error:
            raise ConfigError(f"cannot export: {folder}: {error.strerror or error}") from None
    return 0


def _folder(command: str, arguments: list[str]) -> Path | None:
    """Returns the folder of ``export DIR``, or None after printing the usage. Raises ``ConfigError``."""
    usage = f"usage: chorale {command} export DIR"
    if not arguments or wants_help(arguments):
        print(usage)
        return None
    if arguments[0] != "export":
        raise subcommand(arguments[0], ("export",), f"{command} command", usage)
    if len(arguments) != 2:
        raise ConfigError(f"expected: export DIR; {usage}")
    if arguments[1].startswith("-"):
        raise ConfigError(f"{arguments[1]} is not a folder; {usage}")
    return Path(arguments[1])
