"""Platforms: the kinds of accelerator that ``--device`` names, and which of them are here. Torch-free.

``runtime/device.py`` opens a device of a platform; ``parallel/distributed.py`` connects the ranks on one.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from chorale.machine.hardware import Kind, gpu_count, is_rocm_build, why_no_cuda

_DEV = Path("/dev")
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")  # where AMD's driver lists CPUs and GPUs


@dataclass(frozen=True, slots=True)
class Platform:
    """``library`` exchanges tensors between ranks. ``variables`` choose devices, the usual one first.

    ``state``: a warning for the operator, empty if it has been tested.
    """

    kind: Kind
    library: str
    variables: tuple[str, ...]
    why_absent: Callable[[], str | None]
    count: Callable[[], int]
    state: str = ""

    def variable(self, environment: Mapping[str, str]) -> str:
        """Returns the variable that chooses devices: the one that the operator has set."""
        return next((name for name in self.variables if name in environment), self.variables[0])


def why_no_rocm() -> str | None:
    """Returns why PyTorch cannot find an AMD GPU, or None if it may find one."""
    if not is_rocm_build():
        return (
            "this PyTorch is not a build for ROCm; install one in its place "
            "(docs/how-to/accelerators/rocm.md says how)"
        )
    if not (_DEV / "kfd").exists():
        return (
            "no AMD driver is installed (/dev/kfd is missing; a container needs --device /dev/kfd "
            "--device /dev/dri)"
        )
    return None if count_rocm() else "the AMD driver finds no GPU"


def count_rocm() -> int:
    """Number of GPUs that AMD's driver knows, whatever the variables hide."""
    return sum(_has_simds(node / "properties") for node in _KFD_NODES.glob("*"))


def _has_simds(properties: Path) -> bool:
    try:
        found = re.search(r"^simd_count (\d+)$", properties.read_text("ascii"), re.MULTILINE)
    except OSError:  # a GPU outside this container
        return False
    return found is not None and int(found[1]) > 0


def why_no_npu() -> str | None:
    """Returns why PyTorch cannot find an Ascend NPU, or None if it may find one."""
    if not _is_installed("torch_npu"):
        return (
            "the package torch_npu is not installed: pip install torch-npu, in the version of torch, next to "
            "CANN (docs/how-to/accelerators/npu.md)"
        )
    return None if count_npu() else "no Ascend driver is installed (/dev/davinci0 is missing)"


def count_npu() -> int:
    """Number of NPUs that Ascend's driver shows this process or container."""
    return sum(re.fullmatch(r"davinci\d+", path.name) is not None for path in _DEV.glob("davinci*"))


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


CUDA = Platform("cuda", "NCCL", ("CUDA_VISIBLE_DEVICES",), lambda: why_no_cuda(), lambda: gpu_count())
ROCM = Platform(
    "rocm",
    "RCCL",
    ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    why_no_rocm,
    count_rocm,
    "Chorale has never run on an AMD GPU: its kernels are only compiled for some "
    "(docs/how-to/accelerators/rocm.md lists the first tests, and results to report)",
)
NPU = Platform(
    "npu",
    "HCCL",
    ("ASCEND_RT_VISIBLE_DEVICES",),
    why_no_npu,
    count_npu,
    "Chorale has never run on an Ascend NPU: only a stand-in for torch_npu was tried "
    "(docs/how-to/accelerators/npu.md lists the first tests, and results to report)",
)
PLATFORMS = {platform.kind: platform for platform in (CUDA, ROCM, NPU)}


def find_platform(device: str) -> Platform | None:
    """Returns the platform that ``--device`` means on this machine, or None for the CPU.

    A platform that is named is returned whether it is here or not. In a build for ROCm, "cuda" is PyTorch's
    name for an AMD GPU.
    """
    if device == "cuda":
        return ROCM if is_rocm_build() else CUDA
    if device != "auto":
        return PLATFORMS.get(device)  # type: ignore[call-overload, no-any-return]
    present = (each for each in (ROCM if is_rocm_build() else CUDA, NPU) if each.why_absent() is None)
    return next(present, None)
