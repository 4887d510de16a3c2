"""Kernels: the op sets on which the model is built. ``select_ops`` selects one by name.

Importing this package imports no torch; ``select_ops`` does.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

from chorale.errors import ConfigError
from chorale.kernels.ops import Ops, Precision
from chorale.parallel.rank import Rank
from chorale.parallel.shares import FixedSums

OpsName = Literal["auto", "reference", "cpu", "triton"]


def select_ops(
    name: OpsName | str,
    device: str,
    *,
    dense_experts: bool = False,
    rank: Rank | None = None,
    precision: Precision = "exact",
    fixed: FixedSums | None = None,
) -> Ops:
    """Return the back end ``name`` for ``device`` ("cpu", "cuda", "cuda:1"). ``rank``: this process, if there
    are several ranks.

    "auto" selects Triton on NVIDIA GPUs since Ampere, and on AMD GPUs with a table in ``triton/tuning.py``,
    if the experts are MXFP4; on a CPU the CPU ops, if they were built and there is one rank; and otherwise
    the reference. Raises ``ConfigError`` for a named back end that cannot run; there is no silent fallback.
    ``precision``: precision of the CPU ops. ``fixed``: how sums are computed with ``--batch-invariant``.
    """
    runs_here = rank is None or fixed is not None
    suits_cpu = name == "cpu" or (name == "auto" and device == "cpu" and runs_here)
    if suits_cpu and (ops := _cpu_ops(name, device, rank, precision, fixed)) is not None:
        return ops
    if rank is not None and fixed is not None:
        raise ConfigError(
            f"--batch-invariant: several ranks on {device!r} have no kernels for it; use one "
            "GPU per engine (--data-parallel-size), or ranks on a CPU with --ops cpu"
        )
    if name == "triton" or (name == "auto" and not dense_experts and _suits_triton(device)):
        return _triton_ops(device, rank, batch_invariant=fixed is not None)
    if name not in ("auto", "reference"):
        raise ConfigError(f"ops {name!r}: not one of auto, reference, cpu, triton")
    from chorale.kernels.reference.ops import REFERENCE_OPS, decoding_ops

    ops = REFERENCE_OPS
    if rank is not None:
        from chorale.kernels.reference.shared_ops import shared_ops

        ops = shared_ops(rank)
    if fixed is not None:
        from chorale.kernels.reference.one_by_one import one_by_one

        ops = one_by_one(ops)
    return decoding_ops(ops) if device.startswith("npu") else ops


def _cpu_ops(
    name: str, device: str, rank: Rank | None, precision: Precision, fixed: FixedSums | None
) -> Ops | None:
    """Return the CPU ops, or None if they were not built and ``name`` does not request them."""
    from chorale.kernels.cpu.library import library

    if name == "cpu" and (device != "cpu" or (rank is not None and fixed is None)):
        raise ConfigError(f"ops 'cpu' run on one rank on a CPU, and the device is {device!r}")
    if library().functions is None:
        if name == "cpu":
            raise ConfigError(f"ops 'cpu': {library().why_not}")
        return None
    if fixed is not None:
        from chorale.kernels.cpu.invariant_ops import invariant_ops

        return invariant_ops(precision, fixed, rank)
    from chorale.kernels.cpu.ops import cpu_ops

    return cpu_ops(precision)


def _suits_triton(device: str) -> bool:
    """Returns whether the kernels support this device (docs/explanation/kernels.md: where they have run)."""
    if not device.startswith("cuda") or importlib.util.find_spec("triton") is None:
        return False
    import torch

    if not torch.cuda.is_available():
        return False
    if torch.version.hip is not None:
        from chorale.kernels.triton.launch import architecture_of
        from chorale.kernels.triton.tuning import ARCH_TUNINGS

        return architecture_of(torch.device(device))[0] in ARCH_TUNINGS
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _triton_ops(device: str, rank: Rank | None, *, batch_invariant: bool) -> Ops:
    import torch

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter: kernels run on the CPU
    if not interpreted and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise ConfigError(f"ops 'triton' needs a GPU that PyTorch can use, and the device is {device!r}")
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "ops 'triton': the package triton is not installed (on Linux, torch for CUDA brings it)"
        )
    if rank is not None:
        from chorale.kernels.triton.shared_ops import shared_ops

        return shared_ops(rank)
    from chorale.kernels.triton.ops import triton_ops

    return triton_ops(batch_invariant=batch_invariant)
