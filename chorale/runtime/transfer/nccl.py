"""Back end nccl: the sender, rank 0, broadcasts tensors to all ranks of all engines, in vLLM's form.

Ranks meet at a TCP store of the sender. On a CPU, gloo takes NCCL's place (the sender must use it too).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from chorale.errors import RequestError, invalid
from chorale.runtime.transfer.base import Announced, Check, Spec, convert, num_bytes, read_pickle, unpacked

TIMEOUT = timedelta(seconds=300)
_ID_BYTES = 128  # of an ncclUniqueId
_ID_KEY = "broadcast_from/0/0"  # where vLLM's sender stores it
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # NCCL's numbers


class Init(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``init_info``. ``rank_offset``: rank of the first engine's first rank."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = False
    packed_buffer_size_bytes: int = 2**30
    packed_num_buffers: int = 2


class NcclBackend:
    """``rank``: this rank's number among those of all engines."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._group: GlooGroup | NcclGroup | None = None
        self._most = 0  # bytes after which a packed broadcast ends; 0: each tensor has its own
        self._last = Announced()

    def init(self, info: dict[str, Any]) -> None:
        asked = convert(info, Init, "init_info")
        rank = asked.rank_offset + self._rank
        if not 0 < rank < asked.world_size or asked.packed_buffer_size_bytes < 1:
            raise invalid("init_info", f"rank {rank} of {asked.world_size}, or the buffer, is not possible")
        self.close()
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                asked.master_address, asked.master_port, asked.world_size, is_master=False,
                timeout=TIMEOUT, use_libuv=False,
            )  # fmt: skip
            if self._device.type == "cpu":
                self._group = GlooGroup(store, rank, asked.world_size, TIMEOUT)
            else:
                self._group = NcclGroup(read_id(store.get(_ID_KEY)), rank, asked.world_size, self._device)
        except (RuntimeError, OSError) as error:
            raise RequestError(f"the sender cannot be reached: {error}") from error
        self._most = asked.packed_buffer_size_bytes if asked.packed else 0
        self._last = Announced()

    def receive(self, info: dict[str, Any], check: Check) -> Iterator[tuple[str, torch.Tensor]]:
        if self._group is None:
            raise RequestError("init_weight_transfer_engine was not called, or the connection has ended")
        found = convert(info, Announced, "update_info")
        self._last = found if found.names else self._last
        try:
            for some in chunks(self._last.specs(check), self._most):
                size = sum(num_bytes(dtype, shape) for _, dtype, shape in some)
                octets = torch.empty(size, dtype=torch.uint8, device=self._device)
                self._group.broadcast(octets)
                yield from unpacked(octets, some)
        except RuntimeError as error:
            self.close()  # the sender and this rank may not agree any more on what comes next
            raise RequestError(f"the transfer failed: {error}") from error

    def ended(self) -> None: ...

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None


def chunks(specs: list[Spec], most: int) -> Iterator[list[Spec]]:
    """Yield the tensors that are sent together: up to the one that exceeds ``most`` bytes in all."""
    some, size = list[Spec](), 0
    for each in specs:
        some.append(each)
        size += num_bytes(*each[1:])
        if size > most or not most:
            yield some
            some, size = [], 0
    if some:
        yield some


class GlooGroup:
    """Ranks that receive from rank 0 over gloo, for CPUs. Methods raise ``RuntimeError``."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def broadcast(self, octets: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([octets], options).wait()

    def close(self) -> None:
        self._group = None


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * _ID_BYTES)]


class NcclGroup:
    """The same over NCCL, with its C interface: torch's groups exchange more than vLLM's senders do."""

    def __init__(self, unique_id: bytes, rank: int, size: int, device: torch.device) -> None:
        """``device`` must be the current one."""
        self._library, self._device = ctypes.CDLL("libnccl.so.2"), device  # torch has loaded it
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._comm = ctypes.c_void_p()
        own = _Id.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(self._comm), size, own, rank)
        # vLLM's senders first sum one number.
        self._exchange("ncclAllReduce", torch.zeros(1, device=device), _FLOAT32, _SUM)

    def broadcast(self, octets: torch.Tensor) -> None:
        self._exchange("ncclBroadcast", octets, _UINT8, 0)

    def close(self) -> None:
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommAbort(comm)

    def _exchange(self, name: str, tensor: torch.Tensor, kind: int, how: int) -> None:
        at, stream = ctypes.c_void_p(tensor.data_ptr()), torch.cuda.current_stream(self._device)
        count, where = ctypes.c_size_t(tensor.numel()), ctypes.c_void_p(stream.cuda_stream)
        self._call(name, at, at, count, kind, how, self._comm, where)
        torch.cuda.synchronize(self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {self._library.ncclGetErrorString(code).decode()}")


def read_id(data: bytes) -> bytes:
    """Return the bytes of the ``ncclUniqueId`` that vLLM's sender stored as a pickle. Raises
    ``RequestError``."""
    module = "vllm.distributed.device_communicators.pynccl_wrapper"
    known = {"_ctypes._unpickle": lambda _, state: state[1], f"{module}.ncclUniqueId": None}
    found = read_pickle(data, known)
    if not isinstance(found, bytes) or len(found) != _ID_BYTES:
        raise RequestError("the sender's store has no id of NCCL")
    return found
