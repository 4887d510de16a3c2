"""Communicator: how the ranks of one engine exchange tensors. Imports no torch.

Every rank makes the same calls in the same order, with tensors of the same shape. Results have the same bits
on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from chorale.errors import EngineError

if TYPE_CHECKING:
    import torch


class CommunicationError(EngineError):
    """An exchange failed or took too long: some other rank has ended or hangs."""


class Communicator(Protocol):
    """One rank's end. Calls raise ``CommunicationError``; on a GPU they are enqueued on the current
    stream."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace ``tensor`` by the sum over all ranks, added in the order of ranks. Returns it."""
        ...

    def maximum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace ``tensor`` by the element-wise maximum over all ranks; NaN if any is. Returns it."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, [size, *shape]."""
        ...

    def abort(self) -> None:
        """Make exchanges that are under way fail, as far as the library can. Any thread may call it."""
        ...

    def close(self) -> None:
        """Release the connections."""
        ...


class Alone:
    """The only rank: every result is the argument."""

    rank, size = 0, 1

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def maximum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)

    def abort(self) -> None:
        return None

    def close(self) -> None:
        return None


class Silent(Alone):
    """A rank among several that exchanges nothing: for dry runs, whose results mean nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(self.size, *tensor.shape).contiguous()


ALONE: Communicator = Alone()
