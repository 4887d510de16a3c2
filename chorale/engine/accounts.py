"""Accounts: the work that the engine does for each owner (API key), so that owners take turns.

Prompts and the queue are ordered by ``served``: the tokens computed for an owner, divided by its weight (the
virtual token counters of Sheng et al., OSDI 2024). The owner with the lowest value is next. An owner that
becomes active starts at the lowest value of the active owners, so nobody saves up turns. Rows and blocks are
assigned by ``claim``, the rows that an owner holds divided by its weight; it also breaks ties of ``served``.
With one owner, the order is that of the keys.
"""

from __future__ import annotations

from chorale.engine.types import NOBODY, Owner


class Account:
    """One owner's requests. Batch work has separate accounts, because it yields to all other work."""

    __slots__ = ("is_batch", "num_requests", "num_rows", "served", "weight")

    def __init__(self, owner: Owner = NOBODY, *, is_batch: bool = False) -> None:
        self.weight = owner.weight
        self.is_batch = is_batch
        self.num_requests = 0
        self.num_rows = 0
        self.served = 0.0

    @property
    def claim(self) -> float:
        return self.num_rows / self.weight

    def surplus(self, other: Account) -> int:
        """Return how many rows it can give up and keep its share after ``other`` gets one more row."""
        return max(0, int(self.num_rows - self.weight * (other.num_rows + 1) / other.weight))


class Accounts:
    """The accounts of owners that have requests, and of some that had."""

    def __init__(self) -> None:
        self._by_owner: dict[tuple[str, bool], Account] = {}

    @property
    def are_many(self) -> bool:
        return len(self._by_owner) > 1

    def open(self, owner: Owner, *, is_batch: bool) -> Account:
        """Register a request. Returns its account."""
        name = (owner.name, is_batch)
        account = self._by_owner.setdefault(name, Account(owner, is_batch=is_batch))
        if not account.num_requests:
            others = (each.served for each in self._by_owner.values() if each.num_requests)
            account.served = max(account.served, min(others, default=0.0))
        account.num_requests += 1
        return account

    def close(self, account: Account) -> None:
        """Unregister a request."""
        account.num_requests -= 1
        if not any(each.num_requests for each in self._by_owner.values()):
            self._by_owner.clear()

    def charge_rows(self) -> None:
        """Charge one token for each row. Prompt tokens are charged when they are planned."""
        for account in self._by_owner.values():
            account.served += account.num_rows / account.weight

    def above(self, account: Account) -> Account | None:
        """Return the account that must give up a row for ``account``, or None if no account must."""
        others = [each for each in self._by_owner.values() if each.is_batch == account.is_batch]
        most = max(others, key=lambda each: (each.num_rows - 1) / each.weight, default=account)
        return most if most is not account and most.surplus(account) else None
