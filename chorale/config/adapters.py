"""LoraModule: a LoRA adapter that the operator names."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_NAME = 256  # characters


@dataclass(frozen=True, slots=True)
class LoraModule:
    name: str  # the ``model`` of requests
    path: str  # the adapter's folder
    base: str | None = None  # the base model's name in the API; None: the first served name


def is_name(name: str) -> bool:
    """Returns whether a name can be served."""
    return bool(name) and name.isprintable() and len(name) <= _MAX_NAME
