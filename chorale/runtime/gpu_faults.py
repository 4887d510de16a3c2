"""Errors of GPUs: their meaning, and the remedy for operators. Imports no torch.

CUDA reports an error in a later call, in any library's exception, so errors are recognized by their text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from chorale.errors import ChoraleError, EngineError, GpuError
from chorale.parallel.communicator import CommunicationError


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of error. ``is_hardware``: the GPU is the cause, so a new process may fail again."""

    pattern: re.Pattern[str]
    meaning: str
    remedy: str
    is_hardware: bool = False


_RESET = (
    "take it out of service: stop the processes that use it, then reset it (nvidia-smi --gpu-reset -i "
    "{address}) or reboot the machine; if it fails again, drain the node and have the GPU checked "
    "(nvidia-smi -q -d ECC,ROW_REMAPPER; chorale doctor)"
)
_LOG = (
    "the driver's log has the cause (dmesg | grep Xid): 48, 63, 64, 79, 94 and 95 are faults of the GPU, 74 "
    "of its links (reset it or drain the node); 13 or 31 alone are probably an error of Chorale (please "
    "report it with this message)"
)


def _fault(pattern: str, meaning: str, remedy: str, *, is_hardware: bool = False) -> Fault:
    return Fault(re.compile(pattern, re.IGNORECASE), meaning, remedy, is_hardware)


# Searched in this order, because a message may match several patterns.
FAULTS = (
    _fault(
        r"uncorrectable ECC|ECC_UNCORRECTABLE",
        "has an uncorrectable memory error (ECC)",
        _RESET,
        is_hardware=True,
    ),
    _fault(
        r"uncorrectable NVLink|NVLINK_UNCORRECTABLE|peer GPU memory over nvlink",
        "has a fault of its NVLink connections or of a GPU at their other end",
        _RESET,
        is_hardware=True,
    ),
    _fault(
        r"GPU is lost|fallen off the bus|hardware stack error|GPU requires reset",
        "does not answer",
        _RESET,
        is_hardware=True,
    ),
    _fault(
        r"devices? (?:is|are|\(s\) is/are) busy or unavailable|DEVICES_?UNAVAILABLE",
        "is in exclusive use by another process, or not available",
        "choose another GPU with CUDA_VISIBLE_DEVICES, or end that process; nvidia-smi -q -d COMPUTE shows "
        "whether the GPU is in the mode Exclusive_Process",
    ),
    _fault(
        r"illegal memory access|illegal instruction|misaligned address|unspecified launch failure|"
        r"invalid program counter|launch timed out|device-side assert",
        "stopped a kernel",
        _LOG,
    ),
    _fault(
        r"shared memory segment|/dev/shm",
        "could not be connected to other GPUs: NCCL needs /dev/shm between GPUs without peer access",
        "make it larger: docker run --shm-size=1g or --ipc=host, in Kubernetes an emptyDir of medium Memory",
    ),
    _fault(
        r"CUDA(?: error:)? out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
        "is out of memory",
        "another process may have taken it since this engine measured it (nvidia-smi lists them); choose "
        "another GPU with CUDA_VISIBLE_DEVICES, or lower --gpu-memory-utilization",
    ),
)


def find(error: BaseException) -> Fault | None:
    """Returns the fault that ``error`` or one of its causes reports, or None for other errors."""
    seen: BaseException | None = error
    while seen is not None:
        for fault in FAULTS:
            if fault.pattern.search(str(seen)):
                return fault
        seen = seen.__cause__
    return None


def explain(error: Exception, doing: str, gpu: str) -> EngineError | None:
    """Returns an error that names the GPU and the remedy, or None if ``error`` is not a GPU error.

    ``doing``: the failed action, for example "step 7 failed". ``gpu``: as ``Hardware.label``; "" on a CPU.
    """
    fault = find(error) if gpu else None
    if fault is None or (isinstance(error, ChoraleError) and not isinstance(error, CommunicationError)):
        return None
    kind = GpuError if fault.is_hardware else EngineError
    address = re.search(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.0", gpu)
    remedy = fault.remedy.format(address=address[0] if address else "N")
    first = (str(error).splitlines() or [""])[0]
    return kind(f"{doing}: {gpu} {fault.meaning}; {remedy}. ({type(error).__name__}: {first})")


@contextmanager
def explained(doing: str, gpu: str) -> Iterator[None]:
    """Raises GPU errors as ``EngineError`` or ``GpuError`` with the GPU's name; other errors pass."""
    try:
        yield
    except Exception as error:
        found = explain(error, doing, gpu)
        if found is None:
            raise
        raise found from error
