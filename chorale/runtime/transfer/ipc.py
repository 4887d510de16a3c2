"""Back end ipc: tensors in the memory of another process on the same GPU, by CUDA IPC handles in vLLM's form.

Handles arrive as a pickle, in which only the names that torch writes are known. They become plain data, whose
numbers are checked.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from chorale.errors import RequestError, invalid
from chorale.runtime.transfer.base import (
    DTYPE_NAMES,
    Announced,
    Check,
    Spec,
    convert,
    num_bytes,
    read_pickle,
    unpacked,
)

_COUNTER = re.compile(rb"/torch_[0-9]+_[0-9]+(_[0-9]+)?")  # the shared memory of torch's reference counts
_COUNTERS = 10_000  # in one such file
_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.storage.UntypedStorage",
            "torch.storage.TypedStorage")  # fmt: skip
_KNOWN: dict[str, Any] = {name: name for name in _CLASSES}
_KNOWN |= {f"torch.{name}": name for name in DTYPE_NAMES} | {"torch.Size": tuple}


class Init(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``packed``: several tensors share one buffer."""

    packed: bool = False


class Update(Announced, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pickle has {GPU's UUID: handle}: one such dictionary, or a list of them, one for each tensor.
    ``tensor_sizes``: bytes of each, if packed."""

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
        numbers = (*self.size, *self.stride, self.offset, self.storage_offset)
        extents = [(size - 1) * stride for size, stride in zip(self.size, self.stride, strict=False)]
        item = DTYPE_NAMES[self.dtype].itemsize if self.dtype in DTYPE_NAMES else 2**63
        is_inside = (self.offset + sum(extents) + 1) * item <= self.storage_bytes
        if len(self.size) != len(self.stride) or min(numbers) < 0 or 0 in self.size or not is_inside:
            raise _wrong("the tensor is not inside its storage, or has a wrong type")
        is_counter = _COUNTER.fullmatch(self.counter_name) and 0 <= self.counter < _COUNTERS
        if not 64 <= len(self.memory) <= 256 or len(self.event) not in (0, 64) or not is_counter:
            raise _wrong("not a handle of CUDA that torch has made")

    def open(self, device: int) -> torch.Tensor:
        """Map the memory. Raises ``RuntimeError`` if the driver refuses it."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        return rebuild_cuda_tensor(  # type: ignore[no-any-return]
            torch.Tensor, self.size, self.stride, self.offset, torch.UntypedStorage,
            DTYPE_NAMES[self.dtype], device, self.memory, self.storage_bytes, self.storage_offset, False,
            self.counter_name, self.counter, self.event, self.waits_for_event,
        )  # fmt: skip


def read_handles(text: str, uuid: str) -> list[Handle]:
    """Return the handles for the GPU ``uuid``, checked. Raises ``RequestError``."""
    try:
        found = read_pickle(base64.b64decode(text, validate=True), _KNOWN)
        listed = found if isinstance(found, list) else [found]
        handles = [msgspec.convert(each[uuid], Handle) for each in listed]
    except (binascii.Error, msgspec.ValidationError, TypeError, LookupError) as error:
        raise _wrong(f"no handles for this engine's GPU, {uuid}: {error}") from None
    for handle in handles:
        handle.check()
    return handles


def _wrong(why: str) -> RequestError:
    return invalid("update_info", f"ipc_handles_pickled: {why[:300]}")


class IpcBackend:
    """Maps the sender's memory for the time of a call, or, if packed, until the update ends."""

    def __init__(self, device: torch.device, *, allowed: bool) -> None:
        self._device, self._allowed, self._packed = device, allowed, False
        # torch counts one release for each export; a packed buffer is exported once for all calls.
        self._buffer: tuple[Handle, torch.Tensor] | None = None

    def init(self, info: dict[str, Any]) -> None:
        if not self._allowed:
            raise RequestError("backend ipc needs allow_pickled_handles in --weight-transfer-config")
        if self._device.type != "cuda":
            raise RequestError("backend ipc needs an NVIDIA GPU")
        self._packed = convert(info, Init, "init_info").packed

    def receive(self, info: dict[str, Any], check: Check) -> Iterator[tuple[str, torch.Tensor]]:
        update = convert(info, Update, "update_info")
        specs = update.specs(check)
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        handles = read_handles(update.ipc_handles_pickled, uuid)
        try:
            if self._packed:
                yield from unpacked(self._packed_buffer(update, specs, handles), specs)
            else:
                yield from self._each(specs, handles)
        except RuntimeError as error:
            raise RequestError(f"the memory cannot be mapped: {error}") from error
        torch.cuda.synchronize(self._device)  # the sender may reuse the memory after this call

    def _each(self, specs: list[Spec], handles: list[Handle]) -> Iterator[tuple[str, torch.Tensor]]:
        found = [(DTYPE_NAMES[handle.dtype], list(handle.size)) for handle in handles]
        if found != [(dtype, shape) for _, dtype, shape in specs]:
            raise _wrong("types and shapes of the handles are not those announced")
        for (name, _, _), handle in zip(specs, handles, strict=True):
            yield name, handle.open(self._device.index or 0)

    def _packed_buffer(self, update: Update, specs: list[Spec], handles: list[Handle]) -> torch.Tensor:
        sizes = [num_bytes(dtype, shape) for _, dtype, shape in specs]
        fits = len(handles) == 1 and handles[0].dtype == "uint8" and handles[0].stride == (1,)
        if update.tensor_sizes != sizes or not fits or sum(sizes) > handles[0].size[0]:
            raise _wrong("one buffer of bytes with all tensors, and tensor_sizes, are needed")
        if self._buffer is None or self._buffer[0] != handles[0]:
            self._buffer = handles[0], handles[0].open(self._device.index or 0)
        return self._buffer[1][: sum(sizes)]

    def ended(self) -> None:
        self._buffer = None

    close = ended
