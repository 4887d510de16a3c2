"""HybridCache: the rule of prefix hits against its definition, window blocks, capacity."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorale.engine.kv_cache.cache import BlockTables, HybridCache
from chorale.engine.types import CacheGroup
from tests.engine.kv_cache.test_index_log import Tokens
from tests.support.engine.integrity import check_pool

FULL, WINDOW = CacheGroup.FULL, CacheGroup.WINDOW


def hashes_of(count: int) -> list[bytes]:
    return [index.to_bytes(4, "little") for index in range(count)]


@settings(max_examples=100, deadline=None)
@given(
    block_size=st.sampled_from((1, 3, 7, 16, 64)),
    window=st.sampled_from((1, 2, 7, 16, 17, 128)),
    full=st.sets(st.integers(0, 19)),
    seen=st.sets(st.integers(0, 19)),
    dense=st.booleans(),
)
def test_lookup_is_the_longest_prefix_that_both_groups_serve(
    block_size: int, window: int, full: set[int], seen: set[int], dense: bool
) -> None:
    """Definition: FULL has [0, L), WINDOW has every block that touches [L - (window - 1), L)."""
    if dense:  # mostly present, so that long hits happen
        full, seen = set(range(20)) - set(list(full)[:1]), set(range(20)) - set(list(seen)[:3])
    cache, block_hashes = HybridCache(40, block_size, window), hashes_of(20)
    for group, blocks in ((FULL, full), (WINDOW, seen)):
        for block in blocks:
            cache.pool.publish(group, block_hashes[block], cache.pool.allocate())

    def serves(num_blocks: int) -> bool:
        length = num_blocks * block_size
        needed = {position // block_size for position in range(max(0, length - window + 1), length)}
        return set(range(num_blocks)) <= full and needed <= seen

    assert cache.lookup(block_hashes) == max(filter(serves, range(21)))


@pytest.mark.parametrize("block_size", [1, 7, 16, 64])
@pytest.mark.parametrize("window", [1, 2, 127, 128, 129])
def test_window_blocks_are_kept_exactly_while_a_query_can_see_them(block_size: int, window: int) -> None:
    cache, blocks = HybridCache(4000, block_size, window), BlockTables()
    for computed in range(1, 3 * window + 2 * block_size):
        cache.grow(blocks, computed)
        cache.commit(blocks, computed, [], Tokens())
        visible = [p // block_size for p in range(max(0, computed - window + 1), computed)]
        kept = range(blocks.window_start, blocks.window_start + len(blocks.window))
        assert set(visible) <= set(kept)
        # Beyond those: at most the block that is being filled, whose tokens later queries see.
        assert blocks.window_start == max(0, computed - window + 1) // block_size
        assert len(blocks.full) == len(kept) + blocks.window_start
        check_pool(cache.pool, blocks.full + blocks.window) if computed % 50 == 0 else None


@pytest.mark.parametrize("block_size", [1, 7, 16, 64])
@pytest.mark.parametrize("window", [1, 5, 128])
@pytest.mark.parametrize("num_blocks", [2, 3, 9, 20, 130, 300])
def test_capacity_tokens_fit_alone_and_one_block_more_does_not(
    block_size: int, window: int, num_blocks: int
) -> None:
    """In the worst case a sequence is computed one token a step and committed when a block is full."""
    cache, blocks = HybridCache(num_blocks, block_size, window), BlockTables()
    for computed in range(cache.capacity):
        assert cache.room(blocks, computed) >= 1, f"stuck at {computed} of {cache.capacity}"
        cache.grow(blocks, computed + 1)
        if (computed + 1) % block_size == 0:
            cache.commit(blocks, computed + 1, [], Tokens())
    assert cache.pool.num_free < 2 + (window - 1) // block_size + 1


def test_released_prefix_is_hit_and_shared() -> None:
    cache, blocks, block_hashes = HybridCache(20, 4, 6), BlockTables(), hashes_of(5)
    cache.grow(blocks, 20)
    cache.commit(blocks, 20, block_hashes, Tokens())
    assert blocks.window_start == (20 - 5) // 4
    cache.release(blocks)
    assert cache.pool.num_free == 20
    first, second = BlockTables(), BlockTables()
    assert cache.lookup(block_hashes) == 5
    assert cache.blocks_to_admit(block_hashes, 5, 21) == 1 + 1 + 5 + 2  # new full, new window, idle of both
    cache.attach_prefix(first, block_hashes, 5)
    assert cache.blocks_to_admit(block_hashes, 5, 21) == 1 + 1
    cache.attach_prefix(second, block_hashes, 5)
    assert first.full == second.full
    assert first.window == second.window
    assert first.window_start == 3
    check_pool(cache.pool, 2 * (first.full + first.window))


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    cache, blocks, block_hashes = HybridCache(10, 4, 4), BlockTables(), hashes_of(4)
    cache.grow(blocks, 16)
    cache.commit(blocks, 16, block_hashes, Tokens())
    cache.release(blocks)
    other = BlockTables()
    cache.grow(other, 16)  # 8 blocks: 2 plain, then the oldest cached ones
    assert cache.pool.find(FULL, block_hashes[0]) is not None
    assert cache.pool.find(FULL, block_hashes[3]) is None
