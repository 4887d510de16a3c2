"""Back end ipc: tensors in the memory of another process on the same GPU, by CUDA IPC handles in vLLM's form.

Handles arrive as a pickle. It is read without running anything: only the names that torch writes for a handle
are known, and each becomes plain data, whose numbers are checked.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from chorale.errors import RequestError, invalid
from chorale.runtime.transfer.base import DTYPE_NAMES, Announced, Check, Named, convert, num_bytes, unpacked

_COUNTER = re.compile(rb"/torch_[0-9]+_[0-9]+(_[0-9]+)?")  # the shared memory of torch's reference counts
_COUNTERS = 10_000  # in one such file
_MOST_PICKLED = 2**26  # bytes
_CLASSES = {
    ("torch", "Tensor"), ("torch.nn.parameter", "Parameter"),
    ("torch.storage", "UntypedStorage"), ("torch.storage", "TypedStorage"),
}  # fmt: skip
_DTYPES = {*DTYPE_NAMES, "int8", "int16", "int32", "int64", "bool", "float64"}


class Init(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's ``init_info``. ``packed``: several tensors share one buffer."""

    packed: bool = False


class Update(Announced, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``update_info``. The pickle has {GPU's UUID: arguments of ``rebuild_cuda_tensor``}: one such
    dictionary, or one for each tensor in a list. ``tensor_sizes``: bytes of each, if packed."""

    ipc_handles_pickled: str
    ipc_handles: None = None
    tensor_sizes: list[int] | None = None


class Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The arguments of ``torch.multiprocessing.reductions.rebuild_cuda_tensor``, in their order."""

    tensor_class: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements
    storage_class: str
    dtype: str
    device: int
    memory: bytes
    storage_bytes: int
    storage_offset: int  # bytes
    requires_grad: bool
    counter_name: bytes
    counter: int
    event: bytes
    waits_for_event: bool

    def check(self) -> None:
        """Raise ``RequestError`` if the tensor is not inside its storage, or a field cannot be torch's."""
        extent = self.offset + 1
        if len(self.size) == len(self.stride) <= 8 and min((*self.size, *self.stride), default=0) >= 0:
            extent += sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        else:
            raise _wrong("size and stride do not fit")
        if self.offset < 0 or self.storage_offset < 0 or min(self.size, default=1) < 1:
            raise _wrong("a number is negative, or the tensor is empty")
        if self.dtype not in DTYPE_NAMES or extent * DTYPE_NAMES[self.dtype].itemsize > self.storage_bytes:
            raise _wrong("the tensor is not inside its storage, or has a wrong type")
        if not 64 <= len(self.memory) <= 256 or len(self.event) not in (0, 64):
            raise _wrong("not a handle of CUDA")
        if not _COUNTER.fullmatch(self.counter_name) or not 0 <= self.counter < _COUNTERS:
            raise _wrong("not a reference count of torch")

    def open(self, device: int) -> torch.Tensor:
        """Map the memory. Raises ``RuntimeError`` if the driver refuses it."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        return rebuild_cuda_tensor(  # type: ignore[no-any-return]
            torch.Tensor, self.size, self.stride, self.offset, torch.UntypedStorage,
            DTYPE_NAMES[self.dtype], device, self.memory, self.storage_bytes, self.storage_offset, False,
            self.counter_name, self.counter, self.event, self.waits_for_event,
        )  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Reads a pickle whose only names are those of a handle; they become text, and sizes tuples."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) in _CLASSES or (module == "torch" and name in _DTYPES):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a handle")


def read_handles(text: str, uuid: str) -> list[Handle]:
    """Return the handles for the GPU ``uuid``, checked. Raises ``RequestError``."""
    if len(text) > _MOST_PICKLED * 4 // 3:
        raise _wrong("too long")
    try:
        found = _Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
    except (binascii.Error, pickle.UnpicklingError, EOFError, TypeError, ValueError, LookupError,
            AttributeError, ImportError, RecursionError, OverflowError, MemoryError) as error:  # fmt: skip
        raise _wrong(str(error)) from None
    handles = []
    for each in found if isinstance(found, list) else [found]:
        if not isinstance(each, dict) or uuid not in each:
            raise _wrong(f"no handle for this engine's GPU, {uuid}")
        try:
            handle = msgspec.convert(each[uuid], Handle)
        except msgspec.ValidationError as error:
            raise _wrong(str(error)) from None
        handle.check()
        handles.append(handle)
    return handles


def _wrong(why: str) -> RequestError:
    return invalid("update_info", f"ipc_handles_pickled: {why[:300]}")


class IpcBackend:
    """Maps the sender's memory for the time of a call, or, if packed, until the update ends."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._packed = device, False
        # torch counts one release for each export; a packed buffer is exported once for all calls.
        self._buffer: tuple[Handle, torch.Tensor] | None = None

    def init(self, info: dict[str, Any]) -> None:
        self._packed = convert(info, Init, "init_info").packed

    def receive(self, info: dict[str, Any], check: Check) -> Iterator[Named]:
        if self._device.type != "cuda":
            raise RequestError("backend ipc needs an NVIDIA GPU")
        update = convert(info, Update, "update_info")
        tensors = update.tensors()
        for each in tensors:
            check(*each)
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        handles = read_handles(update.ipc_handles_pickled, uuid)
        try:
            if self._packed:
                yield from self._receive_packed(update, tensors, handles)
            else:
                yield from self._receive_each(tensors, handles)
        except RuntimeError as error:
            raise RequestError(f"the memory cannot be mapped: {error}") from error
        torch.cuda.synchronize(self._device)  # the sender may reuse the memory after this call

    def _receive_each(
        self, tensors: list[tuple[str, torch.dtype, list[int]]], handles: list[Handle]
    ) -> Iterator[Named]:
        if len(handles) != len(tensors):
            raise _wrong(f"{len(handles)} handles for {len(tensors)} tensors")
        for (name, dtype, shape), handle in zip(tensors, handles, strict=True):
            if DTYPE_NAMES[handle.dtype] != dtype or list(handle.size) != shape:
                raise invalid("update_info", f"{name}: the handle has another type or shape")
            yield name, handle.open(self._index)

    def _receive_packed(
        self, update: Update, tensors: list[tuple[str, torch.dtype, list[int]]], handles: list[Handle]
    ) -> Iterator[Named]:
        sizes = [num_bytes(dtype, shape) for _, dtype, shape in tensors]
        if update.tensor_sizes != sizes:
            raise invalid("update_info", "tensor_sizes must be the bytes of each tensor")
        if len(handles) != 1 or handles[0].dtype != "uint8" or sum(sizes) > handles[0].storage_bytes:
            raise _wrong("one buffer of bytes is needed, which contains all tensors")
        if self._buffer is None or self._buffer[0] != handles[0]:
            self._buffer = handles[0], handles[0].open(self._index)
        buffer = self._buffer[1]
        if buffer.dim() != 1 or buffer.stride() != (1,) or sum(sizes) > len(buffer):
            raise _wrong("the buffer is not contiguous, or too short")
        yield from unpacked(buffer, tensors)

    @property
    def _index(self) -> int:
        return 0 if self._device.index is None else self._device.index

    def finished(self) -> None:
        self._buffer = None

    def close(self) -> None:
        self._buffer = None
