"""Kernels: the op sets that the model is written in. ``select_ops`` chooses one, once, by name.

Importing this package imports no torch; choosing does.
"""

from __future__ import annotations

from typing import Literal

from chorale.errors import ConfigError
from chorale.kernels.ops import Ops

OpsName = Literal["auto", "reference", "triton"]


def select_ops(name: OpsName | str, device: str) -> Ops:
    """The back end called ``name`` for ``device`` ("cpu", "cuda", "cuda:1").

    "auto" takes the fastest that exists for the device: so far that is the reference everywhere. A back end
    asked for by name that cannot run raises ``ConfigError``; there is no silent fallback.
    """
    if name == "triton":
        raise ConfigError(f"ops 'triton': this version has no Triton kernels (device {device!r})")
    if name not in ("auto", "reference"):
        raise ConfigError(f"ops {name!r}: not one of auto, reference, triton")
    from chorale.kernels.reference import REFERENCE_OPS

    return REFERENCE_OPS
