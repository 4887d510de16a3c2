"""Shares: divides a limited number of places between owners."""

from __future__ import annotations

from chorale.engine.types import Owner


class Shares:
    """Places of a queue, slots of uploads or connections, by owner (API key).

    While there is room, everybody may have more. When there is none, an owner may still have its share: that
    of its weight among all who hold something, and one at least. So the total can exceed the limit, for K
    owners of equal weight by the factor 1 + 1/2 + ... + 1/K, and owners above their share wait until it no
    longer does.
    """

    def __init__(self) -> None:
        self.total = 0
        self._held: dict[Owner, int] = {}

    def admits(self, owner: Owner, count: int, limit: int) -> bool:
        if self.total + count <= limit:
            return True
        weights = sum(other.weight for other in {*self._held, owner})
        return self._held.get(owner, 0) + count <= max(1.0, limit * owner.weight / weights)

    def take(self, owner: Owner, count: int = 1) -> None:
        self.total += count
        self._held[owner] = self._held.get(owner, 0) + count

    def give(self, owner: Owner, count: int = 1) -> None:
        self.total -= count
        self._held[owner] -= count
        if not self._held[owner]:
            del self._held[owner]
