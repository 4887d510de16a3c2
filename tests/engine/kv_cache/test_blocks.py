"""BlockPool: states of a block, order of eviction, the index."""

from __future__ import annotations

from chorale.engine.kv_cache.blocks import BlockPool
from chorale.engine.types import CacheGroup

FULL = CacheGroup.FULL


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


def test_a_held_block_that_leaves_the_index_is_plain_after_its_last_holder() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.publish(FULL, b"a", block)
    assert pool.unpublish(FULL, b"a") == block
    assert pool.find(FULL, b"a") is None
    assert pool.num_free == 0
    pool.release(block)
    assert (pool.num_free, pool.num_plain) == (1, 1)
