"""BlockPool: free blocks, reference counts, and the prefix index.

One pool of equal blocks serves both cache groups; another is the list of the pages in host memory. Operations
on one block are O(1). A block is in exactly one state:

    owned        refs > 0: the number of block tables that contain it
    cached-free  refs == 0, in the prefix index: a hit revives it, an allocation may evict it (oldest first)
    plain-free   refs == 0, not in the prefix index

The pool works with block ids and block hashes; it never sees tokens or sequences.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import pairwise
from time import monotonic
from typing import Any

from chorale.engine.histogram import BLOCK_SECONDS, Histogram
from chorale.engine.kv_cache.index_log import IndexLog, Medium
from chorale.engine.types import CacheGroup


class BlockPool:
    """Ids ``0 .. num_blocks - 1``, their reference counts, and the prefix index of each group.

    It logs single blocks that leave the index. Those that know more log the others: ``HybridCache`` and
    ``HostLoads`` know the chain of a block that enters it, ``HybridCache`` empties the indexes together.
    """

    __slots__ = ("_cached", "_index", "_key", "_medium", "_on_evict", "_plain", "_refs", "log", "num_blocks")

    def __init__(
        self,
        num_blocks: int,
        log: IndexLog | None = None,
        on_evict: Callable[[CacheGroup, bytes, int], None] | None = None,
        medium: Medium = "GPU",
    ) -> None:
        """``on_evict`` is called for a block that leaves the index because ``allocate`` needs it."""
        self.num_blocks = num_blocks
        self.log = IndexLog() if log is None else log
        self._medium, self._on_evict = medium, on_evict
        self._refs = [0] * num_blocks
        self._plain = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._index: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})
        self._key: list[tuple[CacheGroup, bytes] | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        """Number of blocks that ``allocate`` can return, cached ones included."""
        return len(self._plain) + len(self._cached)

    @property
    def num_plain(self) -> int:
        """Number of free blocks that are not in the prefix index."""
        return len(self._plain)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def allocate(self) -> int:
        """Return a block for new content. The caller has checked ``num_free``; raises KeyError if none is
        free."""
        if self._plain:
            block = self._plain.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a holder to a block that ``find`` returned."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """Remove a holder. Without holders, the block becomes the youngest free one."""
        refs = self._refs[block] - 1
        if refs < 0:
            raise ValueError(f"block {block} released more often than held")
        self._refs[block] = refs
        if refs == 0:
            if self._key[block] is None:
                self._plain.append(block)
            else:
                self._cached[block] = None

    def find(self, group: CacheGroup, block_hash: bytes) -> int | None:
        return self._index[group].get(block_hash)

    def publish(self, group: CacheGroup, block_hash: bytes, block: int) -> bool:
        """Add an owned, fully written block to the prefix index. Returns whether it was added.

        If another block with the same content is indexed already, the index keeps that one.
        """
        index = self._index[group]
        if block_hash in index or self._key[block] is not None:
            return False
        index[block_hash] = block
        self._key[block] = (group, block_hash)
        return True

    def unpublish(self, group: CacheGroup, block_hash: bytes) -> int | None:
        """Remove a block from the prefix index, and return it; its holders keep it. Returns None for an
        unknown hash."""
        block = self._index[group].pop(block_hash, None)
        if block is None:
            return None
        self._key[block] = None
        self.log.removed(group, (block_hash,), self._medium)
        if self._refs[block] == 0:
            del self._cached[block]
            self._plain.append(block)
        return block

    def forget_all(self) -> None:
        """Empty the prefix index."""
        for group in CacheGroup:
            self._index[group].clear()
        self._key = [None] * self.num_blocks
        self._plain.extend(self._cached)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._index[key[0]][key[1]]
            self._key[block] = None
            if self._on_evict is not None:
                self._on_evict(*key, block)
            self.log.removed(key[0], (key[1],), self._medium)

    def published(self, group: CacheGroup) -> Mapping[bytes, int]:
        """The prefix index of a group. Read only."""
        return self._index[group]


ACCESSES = 4  # of the last accesses of a block, the gaps are observed


class ObservedPool(BlockPool):
    """A ``BlockPool`` that observes a ``share`` of its blocks, drawn at random at each allocation.

    It measures how long they live, lie idle before they are evicted, and wait for reuse. As in vLLM, a life
    begins with the block's allocation and ends with the next one; each prefix hit accesses it.
    """

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
