"""Programmatic dependent launch: a kernel starts while the previous kernel still runs, and waits inside.

Every kernel launched with ``dependent`` calls ``wait_for_previous`` before it accesses memory that another
kernel of the step uses; before that it loads weights, while its predecessor finishes. Small kernels let their
successor start once all their programs run. Kernels that stream weights do not, because waiting programs
would occupy the multiprocessors (27.3 instead of 26.1 microseconds per layer without experts, one token,
H200).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chorale.kernels.triton.tuning import H200, ArchTuning, arch_tuning

TRITON_VERSION: str = triton.__version__


@triton.jit
def wait_for_previous(PDL: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr = True):
    """Wait for the previous kernel. Code before this call must not read data of earlier kernels, or write
    data that they read."""
    if PDL:
        gdc_wait()
        if LAUNCH_DEPENDENTS:
            gdc_launch_dependents()


def architecture_of(device: torch.device) -> tuple[str, int]:
    """Return ("sm_90" or "gfx942", multiprocessors) of a GPU; ("", 0) for a CPU with Triton's interpreter.

    Kernels on meta tensors are compiled for the GPU of Triton's driver but not run
    (``precompile/target.py``).
    """
    if device.type == "meta":
        driver = triton.runtime.driver.active
        target = driver.get_current_target()
        return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch), driver.multiprocessors
    if device.type != "cuda":
        return "", 0
    found = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    name = found.gcnArchName.split(":")[0] if hip else f"sm_{found.major}{found.minor}"
    return name, found.multi_processor_count


@functools.cache
def is_nvidia(device: torch.device) -> bool:
    return architecture_of(device)[0].startswith("sm_")


@functools.cache
def is_amd(device: torch.device) -> bool:
    return architecture_of(device)[0].startswith("gfx")


@functools.cache
def capability_of(device: torch.device) -> int:
    """Return 90 for compute capability 9.0; 0 without an NVIDIA GPU."""
    return int(architecture_of(device)[0].removeprefix("sm_")) if is_nvidia(device) else 0


@functools.cache
def tuning_of(device: torch.device) -> ArchTuning:
    """Return the tuning table of a GPU; without a GPU (Triton's interpreter) that of an H200."""
    name, multiprocessors = architecture_of(device)
    return arch_tuning(name, multiprocessors) if name else H200


def is_hopper(device: torch.device) -> bool:
    """Returns whether the device has compute capability 9.0; later GPUs lack its matrix instructions."""
    return capability_of(device) == 90


def dependent(x: torch.Tensor) -> dict[str, bool]:
    """Return launch arguments for a kernel with a constexpr ``PDL``, which is on for Hopper and later
    GPUs."""
    return {"PDL": True, "launch_pdl": True} if capability_of(x.device) >= 90 else {"PDL": False}
