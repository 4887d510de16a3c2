"""Residency: how long blocks of the KV cache live, lie idle before they are evicted, and wait for reuse.

As in vLLM, a block's life begins with its allocation and ends with the next one; each prefix hit accesses it.
"""

from __future__ import annotations

import random
from itertools import pairwise
from time import monotonic
from typing import Any

from chorale.engine.histogram import BLOCK_SECONDS, Histogram
from chorale.engine.kv_cache.blocks import BlockPool

ACCESSES = 4  # of the last accesses of a block, the gaps are observed


class ObservedPool(BlockPool):
    """A ``BlockPool`` that observes a ``share`` of its blocks, drawn at random at each allocation."""

    __slots__ = ("_lives", "_share", "gaps", "idle", "lifetimes")

    def __init__(self, *pool: Any, share: float) -> None:
        super().__init__(*pool)
        self._share = share
        self._lives: dict[int, list[float]] = {}  # block -> times of its allocation and its last accesses
        self.lifetimes, self.idle, self.gaps = (Histogram.empty(BLOCK_SECONDS) for _ in range(3))

    def allocate(self) -> int:
        block = super().allocate()
        now, life = monotonic(), self._lives.pop(block, None)
        if life is not None:
            self.lifetimes.observe(now - life[0])
            self.idle.observe(now - life[-1])
            for earlier, later in pairwise(life[1:]):
                self.gaps.observe(later - earlier)
        if random.random() < self._share:
            self._lives[block] = [now]
        return block

    def share(self, block: int) -> None:
        super().share(block)
        life = self._lives.get(block)
        if life is not None:
            del life[1 : len(life) - ACCESSES + 1]
            life.append(monotonic())

    def forget_all(self) -> None:
        super().forget_all()
        self._lives.clear()
