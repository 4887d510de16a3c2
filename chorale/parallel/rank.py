"""Rank: one of the processes that run a model together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from chorale.parallel.communicator import Communicator, Silent
from chorale.parallel.shares import Share


@dataclass(frozen=True, slots=True)
class Rank:
    """A process's share of the model and its communicator."""

    share: Share
    communicator: Communicator

    @property
    def silent(self) -> Rank:
        """The same rank for a dry run: it exchanges nothing."""
        return replace(self, communicator=Silent(self.share.rank, self.share.size))
