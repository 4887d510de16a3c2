"""LoraModule: a LoRA adapter that the operator names, and the forms of ``--lora-modules``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from chorale.errors import ConfigError

_FLAG = "--lora-modules"
_MAX_NAME = 256  # characters


@dataclass(frozen=True, slots=True)
class LoraModule:
    name: str  # the ``model`` of requests
    path: str  # the adapter's folder
    base: str | None = None  # the base model's name in the API; None: the first served name


def is_name(name: str) -> bool:
    """Returns whether a name can be served."""
    return bool(name) and name.isprintable() and len(name) <= _MAX_NAME


def read_modules(items: Iterable[str]) -> tuple[LoraModule, ...]:
    """Parses NAME=PATH, and JSON objects with name, path and base_model_name, or lists of these.

    Raises ``ConfigError``.
    """
    found = tuple(module for item in items for module in _read(item.strip()))
    names = [module.name for module in found]
    for name in names:
        if not is_name(name):
            raise ConfigError(f"{_FLAG}: {name[:80]!r} cannot be the name of a model")
        if names.count(name) > 1:
            raise ConfigError(f"{_FLAG}: the name {name!r} appears twice")
    return found


def _read(item: str) -> list[LoraModule]:
    if item.startswith(("{", "[")):
        try:
            given = json.loads(item)
        except ValueError as fault:
            raise ConfigError(f"{_FLAG}: {item[:80]!r} is not JSON: {fault}") from fault
        return [_from_object(each) for each in (given if isinstance(given, list) else [given])]
    name, equals, path = item.partition("=")
    if not equals or not path:
        raise ConfigError(f"{_FLAG}: {item[:80]!r} is neither NAME=PATH nor a JSON object")
    return [LoraModule(name, path)]


def _from_object(given: Any) -> LoraModule:
    known = {"name", "path", "base_model_name", "is_3d_lora_weight"}  # the files show the last one
    if not isinstance(given, dict) or given.keys() - known:
        raise ConfigError(f"{_FLAG}: must be an object with name, path and base_model_name")
    name, path, base = (given.get(key) for key in ("name", "path", "base_model_name"))
    if not isinstance(name, str) or not isinstance(path, str) or not path:
        raise ConfigError(f"{_FLAG}: name and path must be strings")
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{_FLAG}: base_model_name must be a string")
    return LoraModule(name, path, base)
