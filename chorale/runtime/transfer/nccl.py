"""Back end nccl: the sender, rank 0, broadcasts tensors to all ranks of all engines, in vLLM's form.

Ranks meet at a TCP store of the sender, or get NCCL's id with ``init_info``. On a CPU, gloo takes NCCL's
place (the sender must use it too). The path over NCCL has not been run on GPUs.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import io
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from chorale.errors import RequestError, invalid
from chorale.runtime.transfer.base import Announced, Check, Named, convert, num_bytes, unpacked

TIMEOUT = timedelta(seconds=300)
_ID_BYTES = 128  # of an ncclUniqueId
_ID_KEY = "broadcast_from/0/0"  # where vLLM's sender stores its first object
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # NCCL's numbers


class Init(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``init_info``. ``rank_offset``: rank of the first engine's first rank."""

    rank_offset: int
    world_size: int
    master_address: str | None = None
    master_port: int | None = None
    nccl_unique_id_b64: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: int = 2**30
    packed_num_buffers: int = 2


class Group(Protocol):
    """Ranks that receive from rank 0."""

    def broadcast(self, octets: torch.Tensor) -> None:
        """Fill ``octets`` [bytes] uint8, contiguous. Raises ``RuntimeError``."""
        ...

    def close(self) -> None: ...


class NcclBackend:
    """``rank``: this rank's number among those of all engines."""

    def __init__(self, device: torch.device, rank: int, timeout: timedelta = TIMEOUT) -> None:
        self._device, self._rank, self._timeout = device, rank, timeout
        self._group: Group | None = None
        self._init: Init | None = None
        self._last = Announced()

    def init(self, info: dict[str, Any]) -> None:
        asked = convert(info, Init, "init_info")
        rank = asked.rank_offset + self._rank
        if not 0 < rank < asked.world_size:
            raise invalid("init_info", f"rank {rank} of {asked.world_size} is not possible")
        if (asked.nccl_unique_id_b64 is None) != (None not in (asked.master_address, asked.master_port)):
            raise invalid("init_info", "needs master_address and master_port, or nccl_unique_id_b64")
        if asked.packed_buffer_size_bytes < 1:
            raise invalid("init_info", "packed_buffer_size_bytes must be at least 1")
        self.close()
        try:
            self._group = self._join(asked, rank)
        except (RuntimeError, OSError) as error:
            raise RequestError(f"the sender cannot be reached: {error}") from error
        self._init, self._last = asked, Announced()

    def receive(self, info: dict[str, Any], check: Check) -> Iterator[Named]:
        if self._group is None or self._init is None:
            raise RequestError("init_weight_transfer_engine was not called, or its connection has ended")
        found = convert(info, Announced, "update_info")
        self._last = found if found.names else self._last
        tensors = self._last.tensors()
        for each in tensors:
            check(*each)
        most = self._init.packed_buffer_size_bytes if self._init.packed else 0
        try:
            for some in chunks(tensors, most):
                octets = torch.empty(
                    sum(num_bytes(dtype, shape) for _, dtype, shape in some),
                    dtype=torch.uint8,
                    device=self._device,
                )
                self._group.broadcast(octets)
                yield from unpacked(octets, some)
        except RuntimeError as error:
            self.close()  # the sender and this rank may not agree any more on what comes next
            raise RequestError(f"the transfer failed: {error}") from error

    def finished(self) -> None:
        return None

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _join(self, asked: Init, rank: int) -> Group:
        if asked.nccl_unique_id_b64 is not None:
            try:
                unique_id = base64.b64decode(asked.nccl_unique_id_b64, validate=True)
            except binascii.Error as error:
                raise invalid("init_info", f"nccl_unique_id_b64: {error}") from None
            return NcclGroup(unique_id, rank, asked.world_size, self._device)
        assert asked.master_address is not None
        assert asked.master_port is not None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            asked.master_address, asked.master_port, asked.world_size, is_master=False,
            timeout=self._timeout, use_libuv=False,
        )  # fmt: skip
        if self._device.type == "cpu":
            return GlooGroup(store, rank, asked.world_size, self._timeout)
        return NcclGroup(read_id(store.get(_ID_KEY)), rank, asked.world_size, self._device)


def chunks(
    tensors: list[tuple[str, torch.dtype, list[int]]], most: int
) -> Iterator[list[tuple[str, torch.dtype, list[int]]]]:
    """Yield the tensors that are sent together: up to the one that exceeds ``most`` bytes. 0: one by one."""
    some: list[tuple[str, torch.dtype, list[int]]] = []
    size = 0
    for each in tensors:
        some.append(each)
        size += num_bytes(*each[1:])
        if size > most or not most:
            yield some
            some, size = [], 0
    if some:
        yield some


class GlooGroup:
    """A group over gloo, for CPUs."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def broadcast(self, octets: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([octets], options).wait()

    def close(self) -> None:
        self._group = None


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * _ID_BYTES)]


class NcclGroup:
    """A group over NCCL, with its C interface: torch's groups exchange more than vLLM's senders do."""

    def __init__(self, unique_id: bytes, rank: int, size: int, device: torch.device) -> None:
        """``device`` must be the current one."""
        if len(unique_id) != _ID_BYTES:
            raise invalid("init_info", f"NCCL's id must have {_ID_BYTES} bytes")
        self._library, self._device = ctypes.CDLL("libnccl.so.2"), device  # torch has loaded it
        self._comm = ctypes.c_void_p()
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        own = _Id.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(self._comm), size, own, rank)
        warm = torch.zeros(1, device=device)  # vLLM's senders exchange one number first
        self._call("ncclAllReduce", *self._both(warm), ctypes.c_size_t(1), _FLOAT32, _SUM, *self._where())
        torch.cuda.synchronize(device)

    def broadcast(self, octets: torch.Tensor) -> None:
        count = ctypes.c_size_t(len(octets))
        self._call("ncclBroadcast", *self._both(octets), count, _UINT8, 0, *self._where())
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommAbort(comm)

    def _both(self, tensor: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        at = ctypes.c_void_p(tensor.data_ptr())
        return at, at

    def _where(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return self._comm, ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {self._library.ncclGetErrorString(code).decode()}")


class _IdUnpickler(pickle.Unpickler):
    """Reads a pickled ctypes structure of any name as its bytes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_ctypes", "_unpickle"):
            return _bytes_of
        if name == "ncclUniqueId":
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is not part of NCCL's id")


def _bytes_of(kind: object, state: tuple[object, bytes]) -> bytes:
    return bytes(state[1])


def read_id(data: bytes) -> bytes:
    """Return the bytes of the ``ncclUniqueId`` that vLLM's sender stored as a pickle. Raises
    ``RuntimeError``."""
    try:
        found = _IdUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise RuntimeError(f"the sender's store has no id of NCCL: {error}") from None
    if not isinstance(found, bytes):
        raise RuntimeError("the sender's store has no id of NCCL")
    return found
