"""Typed reads from a JSON object. Errors name the file and the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chorale.config.sampling_fields import Range
from chorale.errors import ConfigError, ModelConfigError

MAX_CONFIG_BYTES = 4 * 2**20  # published configurations have about 2 KB
MAX_COUNT = 2**31 - 1
MAX_NUMBER = 1e30  # a JSON integer may be too large for a float, and sums of numbers must not overflow


class Fields:
    """One JSON object and its name (``config.json`` or ``config.json: rope_scaling``)."""

    def __init__(
        self, raw: Mapping[str, Any], where: str, kind: type[ConfigError] = ModelConfigError
    ) -> None:
        """``kind``: the errors that are raised."""
        self.raw = raw
        self.where = where
        self._kind = kind

    def error(self, key: str, problem: str) -> ConfigError:
        return self._kind(f"{self.where}: {key}: {problem}", param=key)

    def count(self, key: str, *aliases: str, default: int | None = None) -> int:
        """Return an integer, at least 1. Aliases are looked up when ``key`` is absent."""
        name, value = self._find(key, aliases, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
            raise self.error(name, f"must be a positive integer, not {_show(value)}")
        return value

    def number(self, key: str, *, default: float | None = None, minimum: float | None = None) -> float:
        """Return a finite number: more than 0, or at least ``minimum`` if that is given."""
        name, value = self._find(key, (), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise self.error(name, f"must be a finite number, not {_show(value)}")
        if value < minimum if minimum is not None else value <= 0:
            raise self.error(name, f"is too small: {_show(value)}")
        if value > MAX_NUMBER:
            raise self.error(name, f"is too large: {_show(value)}")
        return float(value)

    def within(self, key: str, allowed: Range) -> float:
        """Return a number in a range."""
        value = self.number(key, minimum=-MAX_NUMBER)
        if not allowed.holds(value):
            raise self.error(key, f"must be {allowed}, not {_show(value)}")
        return value

    def section(self, key: str) -> Fields:
        value = self.raw.get(key)
        if not isinstance(value, Mapping):
            raise self.error(key, "is missing" if value is None else "must be an object")
        return Fields(value, f"{self.where}: {key}", self._kind)

    def _find(self, key: str, aliases: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in (key, *aliases):
            if self.raw.get(name) is not None:
                return name, self.raw[name]
        if default is None:
            raise self.error(key, "is missing")
        return key, default


def read_json(path: Path, max_bytes: int, error: type[ConfigError]) -> Any:
    """Parse a JSON file of limited size. Raises ``error`` naming it."""
    try:
        if not path.is_file():  # opening a pipe would block
            raise error(f"{path}: not a file, or a broken link")
        if path.stat().st_size > max_bytes:
            raise error(f"{path}: larger than {max_bytes} bytes")
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as fault:
        raise error(f"{path}: cannot be read: {fault}") from fault


def read_json_object(path: Path) -> Mapping[str, Any]:
    """Parse a small JSON file. Raises ``ModelConfigError`` naming it."""
    value = read_json(path, MAX_CONFIG_BYTES, ModelConfigError)
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path}: must hold a JSON object")
    return value


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
