"""Accounts: what the engine computes for each owner (API key), so that owners take turns.

Prompts and places in the queue go by ``served``, the tokens computed for an owner divided by its weight (the
virtual token counters of Sheng et al., OSDI 2024): the owner with the least is next. An owner that begins to
have requests starts at the least of those that have some, so nobody saves up turns. Rows and blocks,
and turns of equal ``served``, go by ``claim``, the rows that an owner holds divided by its weight. With one
owner, both keep the order of keys.
"""

from __future__ import annotations

from chorale.engine.types import NOBODY, Owner


class Account:
    """One owner's requests. Batch work has accounts of its own, as it yields to all other."""

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
        """Return how many rows it can give up and still hold its share beside ``other`` with one more."""
        return max(0, int(self.num_rows - self.weight * (other.num_rows + 1) / other.weight))


class Accounts:
    """The accounts of owners that have requests, and of some that had."""

    def __init__(self) -> None:
        self._by_owner: dict[tuple[str, bool], Account] = {}

    @property
    def are_many(self) -> bool:
        return len(self._by_owner) > 1

    def open(self, owner: Owner, *, is_batch: bool) -> Account:
        """Count a request in. Returns its account."""
        name = (owner.name, is_batch)
        account = self._by_owner.setdefault(name, Account(owner, is_batch=is_batch))
        if not account.num_requests:
            others = (each.served for each in self._by_owner.values() if each.num_requests)
            account.served = max(account.served, min(others, default=0.0))
        account.num_requests += 1
        return account

    def close(self, account: Account) -> None:
        """Count a request out."""
        account.num_requests -= 1
        if not any(each.num_requests for each in self._by_owner.values()):
            self._by_owner.clear()

    def charge_rows(self) -> None:
        """Charge a token for each row. Tokens of prompts are charged as they are planned."""
        for account in self._by_owner.values():
            account.served += account.num_rows / account.weight

    def above(self, account: Account) -> Account | None:
        """Return the account that gives up a row for ``account`` first, or None if all keep theirs."""
        others = [each for each in self._by_owner.values() if each.is_batch == account.is_batch]
        most = max(others, key=lambda each: (each.num_rows - 1) / each.weight, default=account)
        return most if most is not account and most.surplus(account) else None
