"""Shares: divides a limited number of slots between owners by weight."""

from __future__ import annotations

from chorale.engine.types import Owner


class Shares:
    """Slots in use, by owner (API key): of a queue, of uploads or of connections.

    Below the limit, every owner may take more slots. At the limit, an owner may still take slots up to its
    share: its fraction of the weights of all owners that use slots, and at least one slot. So the total can
    exceed the limit, for K owners of equal weight by the factor 1 + 1/2 + ... + 1/K. Owners above their share
    then wait until the total is below the limit again.
    """

    def __init__(self) -> None:
        self.total = 0
        self._used: dict[Owner, int] = {}

    def admits(self, owner: Owner, count: int, limit: int) -> bool:
        if self.total + count <= limit:
            return True
        weights = sum(other.weight for other in {*self._used, owner})
        return self._used.get(owner, 0) + count <= max(1.0, limit * owner.weight / weights)

    def take(self, owner: Owner, count: int = 1) -> None:
        self.total += count
        self._used[owner] = self._used.get(owner, 0) + count

    def give(self, owner: Owner, count: int = 1) -> None:
        self.total -= count
        self._used[owner] -= count
        if not self._used[owner]:
            del self._used[owner]
