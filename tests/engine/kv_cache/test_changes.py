"""What a follower of the prefix index knows after each batch of changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chorale.client.routing.prefix_index import PrefixIndex
from chorale.engine.kv_cache.blocks import BlockPool
from chorale.engine.types import BlockChanges, CacheGroup, PrefixIndexState

FULL, WINDOW = CacheGroup.FULL, CacheGroup.WINDOW
HASHES = [bytes([number]) * 16 for number in range(12)]


def follower(pool: BlockPool) -> PrefixIndex:
    return PrefixIndex(PrefixIndexState(b"secret", 4, 8, pool.follow()))


def agrees(pool: BlockPool, index: PrefixIndex) -> bool:
    return index.full == set(pool.published(FULL)) and index.window_hashes == set(pool.published(WINDOW))


def test_nothing_is_recorded_while_nobody_follows() -> None:
    pool = BlockPool(4)
    pool.publish(FULL, HASHES[0], pool.allocate())
    assert pool.take_changes() is None
    assert pool.follow() == BlockChanges(HASHES[0], b"", b"", b"")
    pool.publish(WINDOW, HASHES[1], pool.allocate())
    pool.unfollow()
    assert pool.take_changes() is None


def test_a_block_that_came_and_went_is_told_as_gone() -> None:
    pool = BlockPool(2)
    pool.follow()
    block = pool.allocate()
    pool.publish(FULL, HASHES[0], block)
    pool.release(block)
    pool.allocate()  # the other block
    pool.allocate()  # evicts it
    assert pool.take_changes() == BlockChanges(b"", HASHES[0], b"", b"")
    assert pool.take_changes() is None


def test_everything_that_is_forgotten_is_told() -> None:
    pool = BlockPool(4)
    index = follower(pool)
    for number, group in enumerate((FULL, WINDOW)):
        pool.publish(group, HASHES[number], pool.allocate())
    pool.forget_all()
    changes = pool.take_changes()
    assert changes == BlockChanges(b"", HASHES[0], b"", HASHES[1])
    assert changes is not None
    index.apply(changes)
    assert agrees(pool, index)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "release", "unpublish", "take", "follow", "forget"]),
        st.integers(0, len(HASHES) - 1),
        st.sampled_from([FULL, WINDOW]),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_a_copy_equals_the_index_after_every_batch(actions: list[tuple[str, int, CacheGroup]]) -> None:
    pool = BlockPool(5)
    copies, held = [follower(pool)], list[int]()
    for action, number, group in actions:
        if action == "publish" and pool.num_free:
            held.append(pool.allocate())
            pool.publish(group, HASHES[number], held[-1])
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        elif action == "unpublish":
            pool.unpublish(group, HASHES[number])
        elif action == "forget" and number == 0:
            pool.forget_all()
        elif action == "follow":
            copies.append(follower(pool))  # in the middle of a batch
        elif action == "take" and (changes := pool.take_changes()) is not None:
            for copy in copies:
                copy.apply(changes)
        if action == "take":
            assert all(agrees(pool, copy) for copy in copies)
