"""Kernels: the op sets that the model is written in. ``select_ops`` chooses one, once, by name.

Importing this package imports no torch; choosing does.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

from chorale.errors import ConfigError
from chorale.kernels.ops import Ops

OpsName = Literal["auto", "reference", "triton"]


def select_ops(name: OpsName | str, device: str) -> Ops:
    """The back end called ``name`` for ``device`` ("cpu", "cuda", "cuda:1").

    "auto" takes the reference everywhere until the Triton kernels are validated on a device
    (``docs/kernels.md``). A back end asked for by name that cannot run raises ``ConfigError``; there is no
    silent fallback.
    """
    if name == "triton":
        return _triton_ops(device)
    if name not in ("auto", "reference"):
        raise ConfigError(f"ops {name!r}: not one of auto, reference, triton")
    from chorale.kernels.reference import REFERENCE_OPS

    return REFERENCE_OPS


def _triton_ops(device: str) -> Ops:
    import torch

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: kernels run on the CPU
    if not interpreted and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise ConfigError(f"ops 'triton' needs a GPU that PyTorch can use, and the device is {device!r}")
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "ops 'triton': the package triton is not installed (on Linux, torch for CUDA brings it)"
        )
    from chorale.kernels.triton.ops import TRITON_OPS

    return TRITON_OPS
