"""ProfilerConfig: where traces are written and what they contain, and the reader of the operator's JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from chorale.errors import ConfigError


class ProfilerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The operator's choice, with names and defaults of vLLM's ``--profiler-config``."""

    torch_profiler_dir: str
    profiler: Literal["torch"] = "torch"
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_use_gzip: bool = True


def read_profiler(given: Any, shown: str) -> ProfilerConfig | None:
    """Returns the config, or None if no profiler is chosen. ``shown``: the option's name in messages.

    Raises ``ConfigError`` for a key or value that is not supported, and for a folder that cannot be written.
    """
    if isinstance(given, dict) and given.get("profiler") is None:
        return None
    try:
        config = msgspec.convert(given, ProfilerConfig)
        folder = Path(config.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
    except (msgspec.ValidationError, OSError) as error:
        raise ConfigError(f"{shown}: {error}") from None
    if not folder.is_absolute() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{shown}: torch_profiler_dir must be the absolute path of a folder to write to")
    return config
