"""What a flag is, and how its value is read: on the command line and in YAML alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["str", "int", "float", "bool", "list", "json", "size", "optional"]
Effect = Literal["not needed", "no effect", "refused"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One long flag. ``kind`` decides how a value is read, on the command line and in YAML alike."""

    name: str  # without the leading dashes
    kind: Kind
    target: str | None = None  # "engine.field", "server.field", "cli.name"; None: known, not needed
    help: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
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
            raise ValueError(f"value {number} is not a text")


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


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
        raise ValueError(f"{read!r} is not one of {', '.join(flag.choices)}")
    return read
