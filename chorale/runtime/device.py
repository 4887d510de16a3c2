"""Device: the hardware's capabilities, decided once. The only module of the runtime that distinguishes CPU
and GPU.

All others ask for a capability (``overlap``, ``sample_rows``) or a transfer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from chorale.errors import ConfigError
from chorale.runtime.gpu_faults import explained
from chorale.runtime.hardware import (
    Hardware,
    available_memory,
    check_gpus,
    check_no_instances,
    cpu_count,
)
from chorale.runtime.memory import SMALL_PARAMETERS

GPU_SAMPLE_ROWS = 64  # rows that the sampler takes at once on a GPU
Arrays = list[npt.NDArray[np.generic]]
_CPU = torch.device("cpu")


class Device(Protocol):
    """One accelerator, or the CPU."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def hardware(self) -> Hardware: ...

    @property
    def overlap(self) -> bool:
        """Returns whether a step can run while the host plans the next."""
        ...

    @property
    def can_capture(self) -> bool:
        """Returns whether graphs are supported."""
        ...

    @property
    def sample_rows(self) -> int:
        """Rows that the sampler takes at once."""
        ...

    def upload(self, host: npt.NDArray[np.int32]) -> torch.Tensor:
        """Copy to the device. The caller does not write to ``host`` afterwards."""
        ...

    def download(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
        """Start copies to the host. Returns a function that waits for them."""
        ...

    def host_memory(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory that can be copied to and from the device in the background."""
        ...

    def send(self, memory: torch.Tensor) -> torch.Tensor:
        """Copy some ``host_memory`` to the device in the background.

        The caller does not write to it before it has waited for a later result.
        """
        ...

    def mark(self) -> Callable[[], None]:
        """Mark this point in the device's work. Returns a function that waits until it is reached."""
        ...

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats ``step`` without the host's work. ``step`` uses static memory only.

        Runs ``step`` once first. Its own allocations are shared with other captured steps, so they do not
        keep their content between two steps.
        """
        ...

    def trim(self) -> None:
        """Release memory that is kept for reuse, so that one large allocation can use it."""
        ...


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """The host itself: a step runs when it is executed, and transfers are views."""

    hardware: Hardware
    torch_device: torch.device = _CPU
    overlap: bool = False
    can_capture: bool = False
    sample_rows: int = 1  # one row of logits stays in the cache; rows skip what they do not need

    def upload(self, host: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(host)

    def download(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
        arrays = [tensor.numpy() for tensor in tensors]
        return lambda: arrays

    def host_memory(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def send(self, memory: torch.Tensor) -> torch.Tensor:
        return memory

    def mark(self) -> Callable[[], None]:
        return _nothing

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step itself."""
        step()
        return step

    def trim(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One GPU: work is enqueued on the current stream, results come back through pinned memory."""

    hardware: Hardware
    torch_device: torch.device
    overlap: bool = True
    can_capture: bool = True
    sample_rows: int = GPU_SAMPLE_ROWS
    graphs: Graphs = field(default_factory=lambda: Graphs())

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

    def host_memory(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def send(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.to(self.torch_device, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        return self.graphs.capture(step)

    def trim(self) -> None:
        torch.cuda.empty_cache()


class Graphs:
    """Captures graphs on a separate stream, into one memory pool: graphs run in turn, so they can share
    it."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()  # compiles and loads kernels, and lets libraries allocate their workspace
            # Other threads may use the device meanwhile. torch.cuda.graph would collect garbage and empty the
            # allocator's cache, which takes longer than the capture.
            collects = gc.isenabled()
            gc.disable()  # a collection may free device memory, which a capture does not allow
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
                if collects:
                    gc.enable()
        current.wait_stream(self._stream)
        return graph.replay


def _nothing() -> None:
    return None


def default_threads(num_parameters: int, host_share: int = 1) -> int:
    """Default number of CPU threads: all cores for a large model, all but one for a small one.

    A small model's steps take milliseconds, and each parallel section waits for its slowest thread: with the
    HTTP side on the same two cores, a 256-wide step took 140 ms on two threads and 17 on one. ``host_share``:
    engines among which they are divided.
    """
    cores = cpu_count()
    return max(1, (cores if num_parameters > SMALL_PARAMETERS else cores - 1) // host_share)


def open_device(
    kind: str, num_threads: int | None = None, host_share: int = 1, *, rank: int = 0, ranks: int = 1
) -> Device:
    """``kind``: "auto", "cpu" or "cuda". Raises ``ConfigError`` when a named device is absent.

    ``host_share``: processes among which the memory of a CPU is divided, engines times their ranks.
    ``rank`` takes the visible GPU of that number.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    has_cuda = kind != "cpu" and torch.cuda.is_available()
    if kind == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: PyTorch finds no CUDA device here; use --device cpu, or auto")
    if not has_cuda:
        threads, memory = torch.get_num_threads(), available_memory() // host_share
        name = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        return CpuDevice(Hardware("cpu", name, memory, memory))
    count = torch.cuda.device_count()
    check_no_instances(ranks, [torch.cuda.get_device_name(number) for number in range(count)])
    check_gpus(ranks, count)
    with explained("the device cannot be opened", f"visible GPU {rank}"):
        properties = torch.cuda.get_device_properties(rank)
    place, uuid = place_of(rank, properties)
    with explained("the device cannot be opened", place):
        torch.cuda.set_device(rank)
        free, total = torch.cuda.mem_get_info(rank)
    hardware = Hardware("cuda", properties.name, total, free, place, uuid)
    return CudaDevice(hardware, torch.device("cuda", rank))


def place_of(number: int, properties: Any) -> tuple[str, str]:
    """Returns what names a visible GPU for messages, and its UUID as nvidia-smi writes it; "" where torch
    does not know it."""
    uuid = str(getattr(properties, "uuid", ""))
    if uuid and not uuid.startswith(("GPU-", "MIG-")):
        uuid = f"GPU-{uuid}"
    bus = getattr(properties, "pci_bus_id", None)
    address = ""
    if isinstance(bus, int):
        domain, slot = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
        address = f"{domain:08x}:{bus:02x}:{slot:02x}.0"
    details = ", ".join(part for part in (properties.name, uuid, address) if part)
    return f"GPU {number} ({details})", uuid
