"""``chorale man``: prints the manual page in roff, generated from the tables of commands and options."""

from __future__ import annotations

from collections.abc import Iterator

from chorale.cli.main import COMMANDS
from chorale.cli.options.help import GROUPS, wants_help
from chorale.cli.tree import Option, commands
from chorale.errors import ConfigError
from chorale.version import __version__

USAGE = """usage: chorale man

Prints the manual page. To install it:
chorale man > ~/.local/share/man/man1/chorale.1"""
EXIT_CODES = (
    ("0", "done"),
    ("1", "the command failed"),
    ("2", "the command line or the configuration is invalid"),
    ("130", "interrupted"),
)


def run(arguments: list[str]) -> int:
    if wants_help(arguments):
        print(USAGE)
        return 0
    if arguments:
        raise ConfigError(f"unexpected argument {arguments[0]!r}")
    print("\n".join(page()))
    return 0


def page() -> Iterator[str]:
    yield f'.TH CHORALE 1 "" "chorale {__version__}"'
    yield from (".SH NAME", "chorale \\- serve gpt\\-oss\\-20b and gpt\\-oss\\-120b")
    yield from (".SH SYNOPSIS", ".B chorale", ".I COMMAND", "[options]", ".SH COMMANDS")
    for name, (_, line) in COMMANDS.items():
        yield from (".TP", f".B {_roff(name)}", _roff(line))
    for title, flags in GROUPS.items():
        yield f'.SH "OPTIONS OF SERVE: {title.upper()}"'
        for flag in flags:
            shown = f"--[no-]{flag.name}" if flag.kind == "bool" else f"--{flag.name}"
            yield from _entry(Option(shown, flag.help, choices=flag.choices))
    serve = {
        option.name for command in commands() if command.path == ("serve",) for option in command.options
    }
    for command in commands():
        own = [option for option in command.options if option.name not in serve]
        if own:
            yield f'.SH "OPTIONS OF {" ".join(command.path).upper()}"'
            for option in own:
                yield from _entry(option)
    yield '.SH "EXIT STATUS"'
    for code, meaning in EXIT_CODES:
        yield from (".TP", f".B {code}", meaning)


def _entry(option: Option) -> Iterator[str]:
    values = f" (one of {', '.join(option.choices)})" if option.choices else ""
    yield from (".TP", f".B {_roff(option.name)}", _roff(option.help + values) or "\\&")


def _roff(text: str) -> str:
    """Escapes a line of text, so that it contains no roff escapes or requests."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
