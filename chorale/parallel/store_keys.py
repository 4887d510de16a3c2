"""Keys of torch's symmetric memory that do not depend on what a process did before.

Its exchanges are numbered by the process: "CUDASymmetricMemory.../7/1" is what rank 1 says in the eighth. A
process that starts a second engine has counted on, and the new engine's other ranks, which are new processes,
begin at 0: they would wait for each other until the store's time limit.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_Store: Any = dist.Store  # type: ignore[attr-defined]


class KeysFromZero(_Store):  # type: ignore[misc]
    """A store in front of ``inner`` that numbers each kind of exchange from 0. Keys of other forms pass.

    torch keeps no reference to what Python adds to a store: its user does.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner
        self._first: dict[str, int] = {}  # the number of the first exchange, by kind

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        found: bytes = self._inner.get(self._renumbered(key))
        return found

    def wait(self, keys: list[str], *limit: object) -> None:
        self._inner.wait([self._renumbered(key) for key in keys], *limit)

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check([self._renumbered(key) for key in keys]))

    def _renumbered(self, key: str) -> str:
        kind, *numbers = key.rsplit("/", 2)
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            return key
        first = self._first.setdefault(kind, int(numbers[0]))
        return f"{kind}/{int(numbers[0]) - first}/{numbers[1]}"
