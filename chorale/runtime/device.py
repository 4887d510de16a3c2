"""Device: the hardware's capabilities. The only module of the runtime that distinguishes CPU, GPU and NPU.

All other modules use a capability (``overlap``, ``sample_rows``) or a transfer.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chorale.config.cache_dtype import E4M3
from chorale.errors import ConfigError
from chorale.machine.hardware import (
    Hardware,
    available_memory,
    check_gpus,
    check_no_instances,
)
from chorale.machine.platforms import CUDA, NPU, Platform, find_platform
from chorale.runtime.gpu_faults import explained
from chorale.runtime.streams import CudaEvent, CudaStream, Event, Stream

GPU_SAMPLE_ROWS = 64  # rows that the sampler processes at once on a GPU
Arrays = list[npt.NDArray[np.generic]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, E4M3: torch.float8_e4m3fn}
_CPU = torch.device("cpu")


class Device:
    """One accelerator, or the CPU. The methods here are those of a device whose copies are complete when the
    calls return, and that captures nothing."""

    __slots__ = ()
    torch_device: torch.device
    hardware: Hardware
    overlap: bool  # a step can run while the host plans the next
    can_capture: bool  # graphs are supported
    sample_rows: int  # rows that the sampler processes at once

    def upload(self, host: npt.NDArray[np.int32]) -> torch.Tensor:
        """Copy to the device. The caller must not write to ``host`` afterwards."""
        return torch.from_numpy(host).to(self.torch_device)

    def download(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Arrays]:
        """Start copies to the host. Returns a function that waits for them."""
        arrays = [tensor.cpu().numpy() for tensor in tensors]
        return lambda: arrays

    def host_memory(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory that can be copied to and from the device in the background. The content is
        undefined."""
        return torch.empty(size, dtype=dtype)

    def send(self, memory: torch.Tensor) -> torch.Tensor:
        """Copy a tensor from ``host_memory`` to the device in the background.

        The caller must not write to it before it has waited for a later result.
        """
        return memory.to(self.torch_device)

    def mark(self) -> Callable[[], None]:
        """Mark the current point in the device's work. Returns a function that waits until it is reached."""
        return _nothing

    def stream(self) -> Stream:
        """Make a stream for work that runs in parallel to steps."""
        return Stream()

    def event(self) -> Event:
        """Mark the current point in the work of the current stream."""
        return Event()

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats ``step`` without host work. ``step`` uses static memory only.

        Runs ``step`` once first. Memory that ``step`` allocates is shared with other captured steps, so its
        content is lost between steps.
        """
        step()
        return step

    def trim(self) -> None:
        """Release memory that is kept for reuse, so that one large allocation can use it."""

    def pack_memory(self) -> None:
        """Let allocations share segments, for devices with little memory. Call it before the first one."""


@dataclass(frozen=True, slots=True)
class CpuDevice(Device):
    """The host itself: a step runs when it is executed, and transfers are views."""

    hardware: Hardware
    torch_device: torch.device = _CPU
    overlap: bool = False
    can_capture: bool = False
    sample_rows: int = 1  # one row of logits stays in the cache, and a row skips the filters it does not use

    def trim(self) -> None:
        with contextlib.suppress(AttributeError):  # glibc only
            ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True, slots=True)
class CudaDevice(Device):
    """One GPU (AMD's are "cuda" in PyTorch too): work is enqueued on the current stream, results return
    through pinned memory."""

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
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def send(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.to(self.torch_device, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def stream(self) -> Stream:
        return CudaStream()

    def event(self) -> Event:
        return CudaEvent()

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        return self.graphs.capture(step)

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def pack_memory(self) -> None:
        # Otherwise each large tensor has a segment of its own, rounded up to 2 MiB: 0.24 GiB for the 20b.
        if "PYTORCH_ALLOC_CONF" not in os.environ and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        # cuBLAS's workspace per stream is then 8 MiB, as on consumer GPUs; on Hopper it would be 32.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")


@dataclass(frozen=True, slots=True)
class NpuDevice(Device):
    """One Ascend NPU, through torch_npu. Never run on an NPU, so it uses little: no graphs, no pinned memory,
    and the host waits for each copy."""

    hardware: Hardware
    torch_device: torch.device
    overlap: bool = False
    can_capture: bool = False
    sample_rows: int = GPU_SAMPLE_ROWS

    def mark(self) -> Callable[[], None]:
        event = _npu().Event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def trim(self) -> None:
        _npu().empty_cache()


class Graphs:
    """Captures graphs on a separate stream into one memory pool, which they can share because they never run
    at the same time. PyTorch destroys a pool with its last graph, so the next graph gets a new one."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._captured: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        self._stream = self._stream or torch.cuda.Stream()
        if not self._captured:
            self._pool = torch.cuda.graph_pool_handle()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()  # compiles and loads kernels, and lets libraries allocate their workspace
            # Other threads may use the device meanwhile. torch.cuda.graph is not used: it collects garbage
            # and empties the allocator's cache, which takes longer than the capture.
            collects = gc.isenabled()
            gc.disable()  # a collection may free device memory, which is not allowed during a capture
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
                if collects:
                    gc.enable()
        current.wait_stream(self._stream)
        self._captured.add(graph)
        return graph.replay


def _nothing() -> None:
    return None


def open_device(
    kind: str, num_threads: int | None = None, host_share: int = 1, *, rank: int = 0, ranks: int = 1
) -> Device:
    """Open a device. ``kind``: the value of ``--device``. Raises ``ConfigError`` if a named device is absent.

    ``host_share``: number of processes that share the memory of a CPU, engines times ranks. ``rank`` is also
    the number of the visible device.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    platform = find_platform(kind)
    module = None if platform is None else _module_of(platform)
    if platform is None or module is None or not module.is_available():
        if kind not in ("cpu", "auto") and platform is not None:
            why = platform.why_absent() or f"PyTorch finds no {platform.kind.upper()} device here"
            raise ConfigError(f"--device {kind}: {why}; use --device cpu, or auto")
        threads, memory = torch.get_num_threads(), available_memory() // host_share
        name = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        return CpuDevice(Hardware("cpu", name, memory, memory))
    if platform is CUDA:
        names = [module.get_device_name(number) for number in range(module.device_count())]
        check_no_instances(ranks, names)
    check_gpus(ranks, module.device_count(), platform.variable(os.environ))
    # Only faults of NVIDIA's GPUs are known: on others, messages have no label and are not explained.
    label = uuid = ""
    with explained("the device cannot be opened", f"visible GPU {rank}" if platform is CUDA else ""):
        properties = module.get_device_properties(rank)
    if platform is CUDA:
        label, uuid = label_of(rank, properties)
    with explained("the device cannot be opened", label):
        module.set_device(rank)
        free, total = module.mem_get_info(rank)
    capability = 10 * properties.major + properties.minor if platform is CUDA else 0
    hardware = Hardware(platform.kind, properties.name, total, free, label, uuid, capability)
    if platform is NPU:
        return NpuDevice(hardware, torch.device("npu", rank))
    return CudaDevice(hardware, torch.device("cuda", rank))


def label_of(number: int, properties: Any) -> tuple[str, str]:
    """Returns the label of a visible GPU for messages, and its UUID as nvidia-smi writes it; "" if torch does
    not know it."""
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


def _module_of(platform: Platform) -> Any:
    """Returns the torch module of the platform, or None if it cannot be imported."""
    if platform is not NPU:
        return torch.cuda
    try:
        return _npu()
    except ImportError:
        return None


def _npu() -> Any:
    """Returns ``torch.npu``, which exists once torch_npu is imported.

    Raises ``ImportError``, or ``ConfigError`` if torch_npu is installed but cannot be loaded, for example
    without CANN.
    """
    try:
        importlib.import_module("torch_npu")
    except ModuleNotFoundError:
        raise
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(f"--device npu: torch_npu cannot be loaded (is CANN set up?): {error}") from error
    return torch.get_device_module("npu")
