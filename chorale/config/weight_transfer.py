"""WeightTransferConfig: how new weights may reach the engine, and the reader of the operator's JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from chorale.errors import ConfigError


class WeightTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The operator's choice. ``backend`` is a key of vLLM's ``--weight-transfer-config``.

    ``allowed_folders``, for checkpoint: absolute paths; only files below them are read.
    ``allow_pickled_handles``, for ipc: take CUDA handles from HTTP requests. A wrong handle can make the
    engine read memory of its GPU that belongs to other data, or fail.
    """

    backend: Literal["nccl", "ipc", "checkpoint"] = "nccl"
    allowed_folders: tuple[str, ...] = ()
    allow_pickled_handles: bool = False


def read_weight_transfer(given: Any, shown: str) -> WeightTransferConfig:
    """Returns the config. ``shown``: the option's name in messages. Raises ``ConfigError``."""
    try:
        config = msgspec.convert(given, WeightTransferConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{shown}: {error}") from None
    for folder in config.allowed_folders:
        if not Path(folder).is_absolute():
            raise ConfigError(f"{shown}: allowed_folders: {folder!r} is not an absolute path")
    if config.backend == "checkpoint" and not config.allowed_folders:
        raise ConfigError(f"{shown}: backend checkpoint needs allowed_folders, from which weights are read")
    return config
