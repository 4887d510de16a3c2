"""A simulated GPU for a dry run on meta tensors, which have shapes and types but no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from chorale.runtime.device import GPU_SAMPLE_ROWS, Arrays, CpuDevice

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class TargetDevice(CpuDevice):
    """The capabilities of ``CudaDevice``. Results of steps are zeros."""

    torch_device: torch.device = _META
    overlap: bool = True
    can_capture: bool = True
    sample_rows: int = GPU_SAMPLE_ROWS

    def download(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
        arrays = [torch.zeros(tensor.shape, dtype=tensor.dtype).numpy() for tensor in tensors]
        return lambda: arrays
