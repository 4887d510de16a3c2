"""BlockPool: states of a block, order of eviction, the index."""

from __future__ import annotations

import pytest

from chorale.engine.kv_cache.blocks import BlockPool
from chorale.engine.types import CacheGroup
from tests.support.engine.integrity import check_pool

FULL, WINDOW = CacheGroup.FULL, CacheGroup.WINDOW


def test_allocates_low_ids_first_and_counts() -> None:
    pool = BlockPool(3)
    assert [pool.allocate(), pool.allocate()] == [0, 1]
    assert pool.num_free == 1
    check_pool(pool, [0, 1])


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


def test_second_block_of_equal_content_stays_out_of_the_index() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(FULL, b"a", first)
    pool.publish(FULL, b"a", second)
    assert pool.find(FULL, b"a") == first
    pool.release(second)
    assert len(pool._cached) == 0
    check_pool(pool, [first])


def test_forget_all_makes_every_free_block_plain() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(FULL, b"a", block)
    pool.release(block)
    pool.forget_all()
    assert pool.find(FULL, b"a") is None
    assert (pool.num_free, len(pool._cached)) == (2, 0)
    check_pool(pool, [])


def test_the_check_finds_a_reference_outside_all_tables() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="references"):
        check_pool(pool, [])
    pool.share(block)
    with pytest.raises(AssertionError, match="references"):
        check_pool(pool, [block])
