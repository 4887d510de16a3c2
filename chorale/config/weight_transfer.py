"""WeightTransferConfig: how new weights may reach the engine."""

from __future__ import annotations

from typing import Literal

import msgspec


class WeightTransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's choice. Files of the back end checkpoint are only read below ``allowed_folders``.
    ``allow_pickled_handles``: with ipc, a wrong handle can make the engine read other memory, or fail."""

    backend: Literal["nccl", "ipc", "checkpoint"] = "nccl"
    allowed_folders: tuple[str, ...] = ()
    allow_pickled_handles: bool = False
