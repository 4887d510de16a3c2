"""Hardware: the numbers of a machine that decide sizes. Torch-free, so that the CLI can use it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from chorale.config.engine import VALID_SIZES
from chorale.errors import ConfigError

# Memory of an idle GPU that the driver and this process's context take.
DRIVER_BYTES = 640 * 2**20


_CGROUP = Path("/sys/fs/cgroup")
Kind = Literal["cpu", "cuda", "rocm", "npu"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """``total_bytes`` and ``free_bytes`` of the memory that holds weights and KV blocks."""

    kind: Kind
    name: str
    total_bytes: int
    free_bytes: int
    label: str = ""  # an NVIDIA GPU's number, name, UUID and PCI address, for messages; else ""
    uuid: str = ""  # as nvidia-smi writes it; "": unknown
    capability: int = 0  # compute capability of an NVIDIA GPU, 90 for 9.0; 0: unknown, or another device

    @property
    def decodes_experts(self) -> bool:
        """Returns whether MXFP4 experts are decoded at load: no kernel there reads them packed."""
        return self.kind == "npu"


def cpu_count() -> int:
    """Returns the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not available on every system
        return os.cpu_count() or 1


def has_cuda_driver() -> bool:
    """Returns whether NVIDIA's driver is installed. Without it PyTorch finds no CUDA device."""
    return _cuda_driver() is not None


def why_no_cuda() -> str | None:
    """Return why PyTorch cannot find a CUDA device, or None if it may find one."""
    if is_rocm_build():
        return None  # PyTorch calls AMD's GPUs cuda, too; they have another driver
    if _torch_build() == "cpu":
        return "this PyTorch is a build for CPUs"
    if not has_cuda_driver():
        return "no NVIDIA driver is installed"
    return None if gpu_count() else "the NVIDIA driver finds no GPU"


def is_rocm_build() -> bool:
    """Returns whether the installed PyTorch is a build for AMD's GPUs.

    The version of a build from source has no "+rocm", so PyTorch's version file is read, too.
    """
    if _torch_build().startswith("rocm"):
        return True
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return _names_hip(Path(found.origin).parent / "version.py")


@cache
def _names_hip(versions: Path) -> bool:
    """Returns whether PyTorch's version file names a version of HIP. Read once, since it does not change."""
    try:
        text = versions.read_text("utf-8")
    except OSError:
        return False
    return re.search(r"^hip\b[^=]*= *['\"]", text, re.MULTILINE) is not None


def _torch_build() -> str:
    """Returns what follows "+" in PyTorch's version: "cpu", "cu130", "rocm6.4", or nothing."""
    try:
        return importlib.metadata.version("torch").partition("+")[2]
    except importlib.metadata.PackageNotFoundError:
        return ""


def gpu_count() -> int:
    """Returns the number of GPUs that NVIDIA's driver shows this process (after CUDA_VISIBLE_DEVICES)."""
    driver, count = _cuda_driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def check_gpus(ranks: int, gpus: int, variable: str = "CUDA_VISIBLE_DEVICES") -> None:
    """Raises ``ConfigError`` if there are fewer GPUs than ranks. ``variable`` selects the visible ones."""
    if ranks <= max(gpus, 1):
        return
    most = max(size for size in VALID_SIZES if size <= max(gpus, 1))
    overrides = "on the command line, which overrides a recipe"
    use = (
        f"use --tensor-parallel-size {most} ({overrides})"
        if gpus
        else "use --tensor-parallel-size 1, or --device cpu"
    )
    raise ConfigError(
        f"--tensor-parallel-size {ranks} needs {ranks} GPUs, and {gpus or 'none'} "
        f"{'are' if gpus > 1 else 'is'} visible here (after {variable}): {use}; "
        "chorale fit shows how many GPUs a model needs"
    )


def check_no_instances(ranks: int, gpus: Sequence[str]) -> None:
    """Raises ``ConfigError`` if several ranks are to run on MIG instances. ``gpus``: ids in
    CUDA_VISIBLE_DEVICES, or names as CUDA gives them."""
    instances = [gpu for gpu in gpus if gpu.startswith("MIG-") or " MIG " in gpu]
    if ranks > 1 and instances:
        raise ConfigError(
            f"--tensor-parallel-size {ranks} cannot use MIG instances ({instances[0]}): CUDA shows a process "
            "only one of them, and they cannot communicate; use --data-parallel-size, which runs an engine "
            "on each, or GPUs whose MIG mode is off (nvidia-smi -mig 0)"
        )


def _cuda_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def total_memory() -> int:
    """Returns the bytes of host memory, or the limit of this process's cgroup if that is lower."""
    total = _meminfo("MemTotal")
    limit = _cgroup_number("memory.max")
    return total if limit is None else min(total, limit)


def available_memory() -> int:
    """Returns the bytes of host memory available to this process, within the limit of its cgroup."""
    limit = _cgroup_room()
    available = _meminfo("MemAvailable")
    return available if limit is None else min(available, limit)


def _meminfo(name: str) -> int:
    """Returns the bytes under ``name`` in /proc/meminfo, or all memory on a system without that file."""
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text("ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_number(name: str) -> int | None:
    """Returns a number of this process's version 2 cgroup, or None if there is none or it is "max"."""
    try:
        return int((_CGROUP / name).read_text("ascii"))
    except (OSError, ValueError):
        return None


def _cgroup_room() -> int | None:
    """Returns the bytes left under the memory limit of this process's version 2 cgroup, or None without one.

    Inactive file pages (such as read weights) count as usage there, but are freed when memory is short.
    """
    limit, usage = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is None or usage is None:
        return None
    try:
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text("ascii").splitlines())
        return max(limit - usage + int(stat.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return None
