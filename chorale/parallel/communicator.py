"""Communicator: exchanges tensors between the ranks of one engine. Imports no torch.

Every rank makes the same calls in the same order, with tensors of the same shape. Results have the same bits
on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from chorale.errors import EngineError

if TYPE_CHECKING:
    import torch

    from chorale.parallel.peer_memory import PeerMemory


class CommunicationError(EngineError):
    """An exchange failed or timed out: another rank has ended or hangs."""


class Exchange(Protocol):
    """Kernels that wait for data from other ranks."""

    def check(self) -> None:
        """Raises ``CommunicationError`` with the number of a rank for which a kernel has waited in vain."""
        ...

    def set_limit(self, seconds: float) -> None:
        """Set how long kernels wait, including those that are already waiting."""
        ...


class Communicator:
    """One rank's end. Calls raise ``CommunicationError``; on a GPU they are enqueued on the current stream.

    The methods here are those of the only rank, whose results are the arguments.
    """

    rank, size = 0, 1
    is_waiting = False  # the host waits for other ranks
    why_no_peers = ""  # why ``peer_memory`` failed

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace ``tensor`` with the sum over all ranks, added in the order of ranks. Returns it."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, [size, *shape]."""
        return tensor.unsqueeze(0)

    def peer_memory(self, num_bytes: int, device: torch.device) -> PeerMemory | None:
        """Allocate memory that all ranks can write to. Returns None on all ranks if one of them cannot."""
        return None

    def watch(self, exchange: Exchange) -> None:
        """Include ``exchange`` in ``check`` and ``abort``."""

    def check(self) -> None:
        """Raises ``CommunicationError`` if a watched exchange has failed."""

    def abort(self) -> None:
        """Make current exchanges fail, as far as the library supports it. Any thread may call it."""

    def close(self) -> None:
        """Release the connections."""


class Silent(Communicator):
    """One of several ranks that exchanges nothing: for dry runs, whose results are not used."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(self.size, *tensor.shape).contiguous()

    def peer_memory(self, num_bytes: int, device: torch.device) -> PeerMemory | None:
        from chorale.parallel.peer_memory import simulated_memory

        return simulated_memory(num_bytes, self.rank, self.size, device)


ALONE = Communicator()
