"""WeightTransferConfig: how new weights may reach the engine, and the reader of the operator's JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from chorale.errors import ConfigError


class WeightTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The operator's choice. Files of the back end checkpoint are only read below ``allowed_folders``.
    ``allow_pickled_handles``: with ipc, a wrong handle can make the engine read other memory, or fail."""

    backend: Literal["nccl", "ipc", "checkpoint"] = "nccl"
    allowed_folders: tuple[str, ...] = ()
    allow_pickled_handles: bool = False


def read_weight_transfer(given: Any, shown: str) -> WeightTransferConfig:
    """Returns the config. ``shown``: the option's name in messages. Raises ``ConfigError``."""
    try:
        config = msgspec.convert(given, WeightTransferConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{shown}: {error}") from None
    if config.backend == "checkpoint" and not config.allowed_folders:
        raise ConfigError(f"{shown}: backend checkpoint needs allowed_folders, from which weights are read")
    return config
