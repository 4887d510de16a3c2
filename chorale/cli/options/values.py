"""What a flag is, and how its value is read: on the command line and in YAML alike."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from chorale.errors import ConfigError

Kind = Literal["str", "int", "float", "bool", "list", "json", "size", "optional"]
Effect = Literal["not needed", "no effect", "refused"]
NUMBERS = ("int", "float", "size")
MOST = 2**63 - 1  # the largest number that a message between processes carries; no infinite time, either


@dataclass(frozen=True, slots=True)
class Flag:
    """One long flag. ``kind`` decides how a value is read, on the command line and in YAML alike."""

    name: str  # without the leading dashes
    kind: Kind
    target: str | None = None  # "engine.field", "server.field", "cli.name"; None: known, not needed
    help: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    # Bounds of a number, both allowed; ``above``: the least value itself is not.
    least: float | None = None
    most: float = MOST
    above: bool = False
    synonyms: Mapping[str, str] = field(default_factory=dict)  # vLLM's other words for a value
    refused_values: Mapping[str, str] = field(
        default_factory=dict
    )  # values that others know, and why not here
    environment: tuple[str, ...] = ()  # variables that set it; the first one that is set counts
    # Of a flag without a target: what becomes of it, and why.
    effect: Effect = "not needed"
    note: str = ""
    harmless: tuple[Any, ...] = ()  # values that ask for nothing: neither a line nor an error

    adds: bool = False  # given again, a list grows; other flags keep what was said last
    always: bool = False  # what it turns on cannot be turned off: asking for that is worth a line, too

    def asks(self, value: Any) -> bool:
        """Whether a flag without a target asks for something by this value."""
        if self.always:
            return True
        return value is not None and value is not False and value not in self.harmless


def check_bounds(flag: Flag, value: Any) -> None:
    """Raises ``ConfigError`` for a number outside the flag's bounds (nan is outside all)."""
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
    """The bounds in words: "at least 1", "between 0 and 65535", "above 0 and at most 3600"."""
    least = f"{flag.least:g}" if isinstance(flag.least, float) else f"{flag.least}"
    if flag.above:
        return f"above {least}" if flag.most == MOST else f"above {least} and at most {flag.most}"
    if flag.most == MOST:
        return f"at least {least}"
    if flag.kind == "int" and flag.least == 0 and flag.most <= 2:
        return "0 or 1" if flag.most == 1 else "0, 1 or 2"
    return f"between {least} and {flag.most}"


Origin = Literal["command line", "environment", "file", "default"]
RANK: dict[Origin, int] = {
    "default": 0,
    "file": 1,
    "environment": 2,
    "command line": 3,
}  # the higher one wins


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as the operator gave it, and where."""

    value: Any
    origin: Origin


_SIZE = re.compile(r"^(-?\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB])?$")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int | None:
    """``10k`` = 10,000, ``10K`` = 10,240, ``16GiB``; ``auto`` and ``-1`` mean "decide for me" (None).

    Raises ``ValueError`` on anything else, fractions of a token included.
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
        raise ValueError(f"{text!r} is not a whole, non-negative number")
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


def _check_texts(items: list[Any]) -> None:
    """Raises ``ValueError``: ``- `` in a file is nothing, and must not become a key or a name "None".

    Entries may be secret, so they are counted and not shown.
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


def read_value(flag: Flag, value: Any) -> Any:
    """A YAML or command-line value as the flag's own type. Raises ``ValueError`` with a readable reason."""
    if value is None:
        return None
    if flag.kind == "list":
        items = value if isinstance(value, list) else [value]
        # What is not acted on has its own answer, whatever stands in it.
        if flag.target is not None:
            _check_texts(items)
        return tuple(str(item) for item in items)
    if flag.kind == "json" and not isinstance(value, str):
        return value
    if flag.kind == "bool" and isinstance(value, bool):
        return value
    if isinstance(value, (bool, dict, list)):
        raise ValueError(f"{value!r} is not a {flag.kind}")
    read = READERS[flag.kind](str(value))
    if flag.choices and read not in flag.choices:
        near = difflib.get_close_matches(str(read), flag.choices, n=1)
        why = flag.refused_values.get(str(read).lower())
        hint = f": {why}" if why else f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{read!r} is not one of {', '.join(flag.choices)}{hint}")
    return read
