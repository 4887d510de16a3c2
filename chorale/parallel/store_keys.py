"""Keys of torch's symmetric memory that do not depend on earlier engines of a process.

torch numbers its exchanges per process: "CUDASymmetricMemory.../7/1" is the message of rank 1 in the eighth.
When a process starts a second engine, its count continues, but the new engine's other ranks, which are new
processes, begin at 0: they would wait for each other until the store's time limit.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_Store: Any = dist.Store  # type: ignore[attr-defined]


class KeysFromZero(_Store):  # type: ignore[misc]
    """Wraps the store ``inner`` and numbers each kind of exchange from 0. Other keys are passed on unchanged.

    torch keeps no reference to a store made in Python, so its user must.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner
        self._first: dict[str, int] = {}  # kind -> number of its first exchange

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
