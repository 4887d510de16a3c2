"""PeerMemory: memory that all ranks of a host can write to, over NVLink or PCIe.

NVLink multicast is never used. Tests make a ``PeerMemory`` from shared memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A buffer of the same size on every rank."""

    rank: int
    size: int  # number of ranks
    buffer: torch.Tensor  # this rank's [bytes / 4] int32
    # [size] int64, on the device: start addresses of all ranks' buffers, as this rank sees them.
    addresses: torch.Tensor
    barrier: Callable[[], None]  # waits for the host threads of all ranks
    owner: Any = None  # keeps the peers' memory mapped


class NamedGroup:
    """Makes ``name`` known to ``symmetric_memory`` for ranks that have a store and no default group."""

    def __init__(self, name: str, rank: int, size: int, store: Any) -> None:
        from torch._C import _distributed_c10d as c10d

        # Torch keeps no reference to attributes that Python adds to a store.
        self.name, self._store = name, store
        # A group without collectives: only its rank, size and store are read.
        self._group = c10d.ProcessGroup(store, rank, size)
        c10d._register_process_group(cast("Any", name), self._group)

    def close(self) -> None:
        from torch._C import _distributed_c10d as c10d

        c10d._unregister_process_group(cast("Any", self.name))


def symmetric_memory(
    num_bytes: int, group_name: str, device: torch.device, barrier: Callable[[], None]
) -> PeerMemory:
    """Allocate memory on all ranks of a group; all must call this. Raises ``RuntimeError`` if the GPUs cannot
    access each other's memory. ``barrier`` returns when all ranks have called it."""
    from torch._C._distributed_c10d import _SymmetricMemory

    buffer = _SymmetricMemory.empty_strided_p2p((num_bytes // 4,), (1,), torch.int32, device)
    handle = _SymmetricMemory.rendezvous(buffer, group_name)
    offset = buffer.data_ptr() - handle.buffer_ptrs[handle.rank]  # offset of the tensor in its allocation
    addresses = torch.tensor([place + offset for place in handle.buffer_ptrs], device=device)

    def wait_for_all() -> None:
        torch.cuda.synchronize(device)
        barrier()

    return PeerMemory(handle.rank, handle.world_size, buffer, addresses, wait_for_all, handle)


def simulated_memory(num_bytes: int, rank: int, size: int, device: torch.device) -> PeerMemory:
    """Return memory without peers, for dry runs, which launch nothing."""
    buffer = torch.empty(num_bytes // 4, dtype=torch.int32, device=device)
    addresses = torch.zeros(size, dtype=torch.int64, device=device)
    return PeerMemory(rank, size, buffer, addresses, lambda: None)
