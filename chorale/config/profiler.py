"""ProfilerConfig: where traces are written and what they contain, and the reader of the operator's JSON.

Names and defaults are those of vLLM's ``--profiler-config``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from chorale.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """The operator's choice. ``read_profiler`` checks the values."""

    torch_profiler_dir: str
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_use_gzip: bool = True


_NAMES = ("profiler", *(field.name for field in fields(ProfilerConfig)))


def read_profiler(given: Any, shown: str) -> ProfilerConfig | None:
    """Returns the config, or None if no profiler is chosen. ``shown``: the option's name in messages.

    Raises ``ConfigError`` for a key or value that is not supported, and for a folder that cannot be written.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'{shown}: must be a JSON object, such as {{"profiler": "torch", "torch_profiler_dir": "/tmp"}}'
        )
    values = {str(name): value for name, value in given.items() if value is not None}
    for name, value in values.items():
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            raise ConfigError(
                f"{shown}: the key {name!r} is not supported" + (f"; did you mean {near[0]}?" if near else "")
            )
        kind = str if name in ("profiler", "torch_profiler_dir") else bool
        if not isinstance(value, kind):
            raise ConfigError(f"{shown}: {name} must be {'a string' if kind is str else 'true or false'}")
    profiler = values.pop("profiler", None)
    if profiler is None:
        return None
    if profiler != "torch":
        raise ConfigError(f"{shown}: profiler {profiler!r} is not supported; use torch")
    return ProfilerConfig(**values | {"torch_profiler_dir": _folder(values, shown)})


def _folder(values: Mapping[str, Any], shown: str) -> str:
    folder = Path(values.get("torch_profiler_dir", ""))
    if not folder.is_absolute():
        raise ConfigError(f"{shown}: torch_profiler_dir must be an absolute path")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{shown}: {folder} cannot be created: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{shown}: {folder} cannot be written")
    return str(folder)
