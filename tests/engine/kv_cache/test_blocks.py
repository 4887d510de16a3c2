"""BlockPool: states of a block, order of eviction, the index."""

from __future__ import annotations

import pytest

from chorale.engine.kv_cache.blocks import BlockPool
from chorale.engine.types import CacheGroup
from tests.support.engine.integrity import check_pool

FULL, WINDOW = CacheGroup.FULL, CacheGroup.WINDOW


def test_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="more often than held"):
        pool.release(block)


def test_cached_block_stays_findable_until_it_is_evicted() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(FULL, b"a", first)
    pool.publish(WINDOW, b"a", second)
    pool.release(first)
    pool.release(second)
    assert (pool.find(FULL, b"a"), pool.find(WINDOW, b"a")) == (first, second)
    assert (pool.num_free, len(pool._cached)) == (2, 2)
    assert pool.allocate() == first  # the oldest
    assert pool.find(FULL, b"a") is None
    assert pool.find(WINDOW, b"a") == second
    check_pool(pool, [first])


def test_plain_blocks_are_allocated_before_cached_ones() -> None:
    pool = BlockPool(2)
    cached = pool.allocate()
    pool.publish(FULL, b"a", cached)
    pool.release(cached)
    assert pool.allocate() != cached
    assert pool.find(FULL, b"a") == cached


def test_a_hit_revives_a_block_and_makes_it_young() -> None:
    pool = BlockPool(2)
    blocks = [pool.allocate(), pool.allocate()]
    for block, block_hash in zip(blocks, (b"a", b"b"), strict=True):
        pool.publish(FULL, block_hash, block)
        pool.release(block)
    pool.share(blocks[0])
    assert pool.num_free == 1
    pool.release(blocks[0])
    assert pool.allocate() == blocks[1]
    assert pool.find(FULL, b"a") == blocks[0]
