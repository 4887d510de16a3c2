"""Memory that all ranks of a host can write to: torch's symmetric memory, and how it is divided.

NVLink multicast is never used. Tests make a ``PeerMemory`` of shared memory of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from chorale.kernels.triton import tuning
from chorale.kernels.triton.reduce.words import EMPTY


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A buffer of the same size on every rank."""

    rank: int
    size: int  # ranks
    buffer: torch.Tensor  # this rank's [bytes / 4] int32
    addresses: torch.Tensor  # [size] int64, on the device: where each rank's buffer begins for this one
    barrier: Callable[[], None]  # of all ranks' hosts
    owner: Any = None  # keeps the peers' memory mapped


def name_group(name: str, rank: int, size: int, store: Any) -> None:
    """Makes ``name`` known to ``symmetric_memory`` for ranks that have a store and no registered group."""
    from torch._C._distributed_c10d import _SymmetricMemory

    _SymmetricMemory.set_group_info(name, rank, size, store)


def symmetric_memory(
    num_bytes: int, group_name: str, device: torch.device, barrier: Callable[[], None]
) -> PeerMemory:
    """Allocates on all ranks of a group, which all call this. Raises ``RuntimeError`` if the GPUs cannot
    access each other's memory. ``barrier`` returns when all ranks have called it."""
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(num_bytes // 4, dtype=torch.int32, device=device)
    handle = symmetric.rendezvous(buffer, cast("Any", group_name))
    offset = buffer.data_ptr() - handle.buffer_ptrs[handle.rank]  # of a tensor in a larger allocation
    addresses = torch.tensor([place + offset for place in handle.buffer_ptrs], device=device)

    def wait_for_all() -> None:
        torch.cuda.synchronize(device)
        barrier()

    return PeerMemory(handle.rank, handle.world_size, buffer, addresses, wait_for_all, handle)


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in bytes of what the kernels keep in a ``PeerMemory``. The same on all ranks."""

    size: int  # ranks
    hidden: int
    tokens: int  # of the largest step
    few: int  # rows of the largest one-shot call
    dtype: torch.dtype  # of the model: what norms and parts are rounded to

    @property
    def few_from(self) -> int:
        """Bytes of a sender's words, one-shot; rows are as far apart as float32 ones."""
        return self.few * self.hidden * 4

    @property
    def rows(self) -> int:
        """Most rows of an owner, two-shot."""
        return -(-self.tokens // self.size)

    @property
    def many_from(self) -> int:
        """Bytes of a sender's words, two-shot."""
        return self.rows * self.hidden * self.dtype.itemsize

    @property
    def words(self) -> int:
        """Words of two-shot calls."""
        return 2 * self.size * self.few_from

    @property
    def normed(self) -> int:
        return self.words + self.size * self.many_from

    @property
    def low(self) -> int:
        return self.normed + self.tokens * self.hidden * self.dtype.itemsize

    @property
    def whole(self) -> int:
        return self.low + self.tokens * self.hidden * self.dtype.itemsize

    @property
    def flags(self) -> int:
        return self.whole + self.tokens * self.hidden * 4

    @property
    def num_bytes(self) -> int:
        return self.flags + self.size * tuning.REDUCE_FLAGS * 4

    def prepare(self, memory: PeerMemory) -> None:
        """Makes all words empty and all flags zero, on all ranks, which all call this."""
        memory.buffer[: self.normed // 4].fill_(EMPTY.value)
        memory.buffer[self.flags // 4 :].zero_()
        memory.barrier()

    def result(self, memory: PeerMemory, offset: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """[tokens, H] of one of the results."""
        begin = offset // 4
        words = tokens * self.hidden * dtype.itemsize // 4
        return memory.buffer[begin : begin + words].view(dtype).view(tokens, self.hidden)
