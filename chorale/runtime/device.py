"""Device: what the hardware can do, decided once. The only file of the runtime that tells a CPU from a GPU.

Everything else asks for a capability (``overlap``, ``sample_rows``) or for a transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from chorale.errors import ConfigError
from chorale.runtime.hardware import Hardware, available_memory, cpu_count
from chorale.runtime.memory import SMALL_PARAMETERS

Arrays = list[npt.NDArray[np.generic]]
_CPU = torch.device("cpu")


class Device(Protocol):
    """One accelerator, or the CPU."""

    torch_device: torch.device
    hardware: Hardware
    overlap: bool  # a step can run while the host plans the next
    sample_rows: int  # rows that the sampler takes at once

    def upload(self, host: npt.NDArray[np.int32]) -> torch.Tensor:
        """One copy to the device. ``host`` is not written to again by the caller."""
        ...

    def download(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
        """Start copies to the host; the returned function waits for them."""
        ...

    def free_memory(self) -> int:
        """Bytes that could be allocated now."""
        ...


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """The host itself: a step runs when it is executed, and transfers are views."""

    hardware: Hardware
    torch_device: torch.device = _CPU
    overlap: bool = False
    sample_rows: int = 1  # one row of logits stays in the cache; rows skip what they do not need

    def upload(self, host: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(host)

    def download(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
        arrays = [tensor.numpy() for tensor in tensors]
        return lambda: arrays

    def free_memory(self) -> int:
        return available_memory()


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One GPU: work is enqueued on the current stream, results come back through pinned memory."""

    hardware: Hardware
    torch_device: torch.device
    overlap: bool = True
    sample_rows: int = 64

    def upload(self, host: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(host).pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def wait() -> Arrays:
            event.synchronize()
            return [copy.numpy() for copy in copies]

        return wait

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0]


def default_threads(num_parameters: int) -> int:
    """CPU threads when nobody said: all cores for a large model, all but one for a small one.

    A small model's steps take milliseconds, and each parallel section waits for its slowest thread: with the
    HTTP side on the same two cores, a 256-wide step took 140 ms on two threads and 17 on one.
    """
    cores = cpu_count()
    return cores if num_parameters > SMALL_PARAMETERS else max(1, cores - 1)


def open_device(kind: str, num_threads: int | None = None) -> Device:
    """``kind``: "auto", "cpu" or "cuda". Raises ``ConfigError`` when a named device is absent."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    has_cuda = kind != "cpu" and torch.cuda.is_available()
    if kind == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: PyTorch finds no CUDA device here; use --device cpu, or auto")
    if not has_cuda:
        threads = torch.get_num_threads()
        return CpuDevice(
            Hardware(
                "cpu",
                f"CPU, {threads} thread{'s' if threads > 1 else ''}",
                available_memory(),
                available_memory(),
            )
        )
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return CudaDevice(Hardware("cuda", properties.name, total, free), torch.device("cuda", 0))
