"""Definition of a flag, and conversion of its values from the command line and from YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from chorale.config.suggestions import nearest
from chorale.errors import ConfigError

Kind = Literal["str", "int", "float", "bool", "list", "json", "size", "optional"]
Effect = Literal["not needed", "no effect", "refused"]
NUMBERS = ("int", "float", "size")
MOST = 2**63 - 1  # largest integer in messages between processes; also excludes infinite times


@dataclass(frozen=True, slots=True)
class Flag:
    """A long flag. ``kind`` determines how values are parsed, on the command line and in YAML."""

    name: str  # without the leading dashes
    kind: Kind
    target: str | None = None  # "engine.field", "server.field", "cli.name"; None: has no effect
    help: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    # Inclusive bounds of a number; with ``above`` the lower bound is exclusive.
    least: float | None = None
    most: float = MOST
    above: bool = False
    synonyms: Mapping[str, str] = field(default_factory=dict)  # vLLM's other names for a value
    refused_values: Mapping[str, str] = field(
        default_factory=dict
    )  # values of other engines, with the reason why they are refused
    environment: tuple[str, ...] = ()  # environment variables; the first one that is set counts
    # For a flag without a target: how it is treated, and why (``note``).
    effect: Effect = "not needed"
    note: str = ""
    harmless: tuple[Any, ...] = ()  # values that request nothing: no notice and no error

    adds: bool = False  # repeated flags add to a list; otherwise the last one counts
    always: bool = False  # always on: turning it off produces a notice, too

    def asks(self, value: Any) -> bool:
        """Returns whether this value of a flag without a target requests anything."""
        if self.always:
            return True
        return value is not None and value is not False and value not in self.harmless


def check_bounds(flag: Flag, value: Any) -> None:
    """Raises ``ConfigError`` for a number outside the flag's bounds (NaN always is)."""
    if flag.kind not in NUMBERS or flag.least is None or value is None:
        return
    if not (value > flag.least if flag.above else value >= flag.least):
        raise ConfigError(f"--{flag.name} must be {_range(flag)}")
    if not value <= flag.most:
        many = flag.most == MOST
        raise ConfigError(
            f"--{flag.name} {value}: is too large" if many else f"--{flag.name} must be {_range(flag)}"
        )


def _range(flag: Flag) -> str:
    """Returns the bounds in words: "at least 1", "between 0 and 65535", "above 0 and at most 3600"."""
    least = f"{flag.least:g}" if isinstance(flag.least, float) else f"{flag.least}"
    if flag.above:
        return f"above {least}" if flag.most == MOST else f"above {least} and at most {flag.most}"
    if flag.most == MOST:
        return f"at least {least}"
    if flag.kind == "int" and flag.least == 0 and flag.most <= 2:
        return "0 or 1" if flag.most == 1 else "0, 1 or 2"
    return f"between {least} and {flag.most}"


Origin = Literal["command line", "environment", "file", "default"]
_ORIGINS: tuple[Origin, ...] = ("default", "file", "environment", "command line")  # the last one applies


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its origin."""

    value: Any
    origin: Origin


def wins(setting: Setting, other: Setting | None, shown: str, shown_other: str) -> bool:
    """Returns whether a setting overrides one that contradicts it. Raises ``ConfigError`` for a tie."""
    if other is None or other.value is None:
        return True
    if other.origin == setting.origin:
        raise ConfigError(
            f"{shown} and {shown_other} ({setting.origin}) contradict each other; give only one"
        )
    return _ORIGINS.index(setting.origin) > _ORIGINS.index(other.origin)


_SIZE = re.compile(r"^(-?\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB])?$")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int | None:
    """Parses ``10k`` = 10,000, ``10K`` = 10,240, ``16GiB``. Returns None for ``auto`` and ``-1``.

    Raises ``ValueError`` for anything else, including fractions of a token.
    """
    if text.strip().lower() == "auto":
        return None
    match = _SIZE.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number (examples: 8192, 10k, 10K, 16GiB)")
    number, unit = match.group(1), match.group(2)
    scale = _BINARY.get(unit) or _DECIMAL[unit]
    if (match.group(3) or "").startswith("i"):
        scale = _BINARY[unit.upper()] if unit else 1
    value = float(number) * scale
    if value == -1:
        return None
    if value != int(value) or value < 0:
        raise ValueError(f"{text!r} is not a non-negative integer")
    return int(value)


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"""{text[:60]!r} is not JSON ({error}); for example '["*"]' or '{{"a": 1}}'"""
        ) from None


def _check_strings(items: list[Any]) -> None:
    """Raises ``ValueError`` for items that are not strings: an empty YAML item must not become the string
    "None".

    Items may be secret, so the message contains their position only.
    """
    for number, item in enumerate(items, 1):
        if item is None or isinstance(item, (bool, dict, list)):
            raise ValueError(f"value {number} is not a string")


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not an integer") from None


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


READERS: dict[Kind, Callable[[str], Any]] = {
    "str": str,
    "int": _parse_int,
    "float": _parse_float,
    "bool": _parse_bool,
    "list": str,
    "json": _parse_json,
    "size": parse_size,
    "optional": str,
}


_WORDS: dict[Kind, str] = {  # for messages
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "size": "a number (examples: 8192, 10k, 10K, 16GiB)",
    "optional": "a string",
}


def read_value(flag: Flag, value: Any) -> Any:
    """Converts a YAML or command-line value to the flag's type.

    Raises ``ValueError`` with a readable reason.
    """
    if value is None:
        return None
    if flag.kind == "list":
        items = value if isinstance(value, list) else [value]
        # A flag without effect gets its notice whatever its value.
        if flag.target is not None:
            _check_strings(items)
        return tuple(str(item) for item in items)
    if flag.kind == "json" and not isinstance(value, str):
        return value
    if flag.kind == "bool" and isinstance(value, bool):
        return value
    if isinstance(value, (bool, dict, list)):
        raise ValueError(f"{value!r} is not {_WORDS[flag.kind]}")
    read = READERS[flag.kind](str(value))
    if flag.choices and read not in flag.choices:
        why = flag.refused_values.get(str(read).lower())
        hint = f": {why}" if why else nearest(str(read), flag.choices)
        raise ValueError(f"{read!r} is not one of {', '.join(flag.choices)}{hint}")
    return read
