"""An argparse parser with one-line errors and suggestions for unknown options.

As in vLLM's parser, an option may be abbreviated to any unambiguous prefix (``whole_names``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from chorale.config.options.help import Formatter
from chorale.config.suggestions import nearest
from chorale.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises ``ConfigError`` where argparse would print its usage and exit."""

    def __init__(self, prog: str, *, usage: str | None = None, description: str | None = None) -> None:
        super().__init__(
            prog, usage=usage, description=description, formatter_class=Formatter, allow_abbrev=False
        )
        self.hints: dict[str, str] = {}  # unknown option -> what to use instead

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses a command line with options that may be abbreviated."""
        given: argparse.Namespace = self.parse_args(whole_names(arguments, self.option_names))
        return given

    def error(self, message: str) -> NoReturn:
        message = message.replace("unrecognized arguments", "unexpected arguments")
        raise ConfigError(message.removeprefix("argument "))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given, rest = self.parse_known_args(args, namespace)
        for token in rest:
            if token.startswith("--"):
                name = token.partition("=")[0]
                raise ConfigError(unknown_option(name, self.option_names) + self.hints.get(name, ""))
        if rest:
            self.error(f"unexpected arguments: {' '.join(rest)}")
        return given

    @property
    def option_names(self) -> dict[str, str]:
        """Maps every long option, without dashes, to its destination, which synonyms share."""
        return {
            name[2:]: action.dest
            for action in self._actions
            for name in action.option_strings
            if name.startswith("--")
        }


def unknown_option(token: str, names: Iterable[str]) -> str:
    """Returns a message such as "unknown option --max-modle; did you mean --max-model?"."""
    known = [name for name in names if "_" not in name]
    return f"unknown option {token}{nearest(token.removeprefix('--').replace('_', '-'), known, '--')}"


def whole_names(arguments: Sequence[str], names: dict[str, str]) -> list[str]:
    """Writes out abbreviated options: ``--random-input`` becomes ``--random-input-len``.

    ``names``: option name -> destination. Unknown options are unchanged. Raises ``ConfigError`` for a prefix
    of several options with different destinations.
    """
    whole: list[str] = []
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        if token == "--":
            return [*whole, token, *rest]
        whole.append(_whole_name(token, names) if token.startswith("--") else token)
    return whole


def _whole_name(token: str, names: dict[str, str]) -> str:
    head, equals, value = token.partition("=")
    name, dot, path = head[2:].partition(".")
    name = name.replace("_", "-")
    if name not in names:
        found = sorted(each for each in names if each.startswith(name))
        if len({names[each] for each in found}) > 1:
            listed = ", ".join("--" + each for each in found)
            raise ConfigError(f"ambiguous option {head}: it could be {listed}")
        name = found[0] if found else name
    return f"--{name}{dot}{path}{equals}{value}"
