"""IndexLog: each arrival in the prefix index and each departure, once, with the block's parent and tokens.

Also what a client that follows the index knows after each batch.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from chorale.client.routing.prefix_index import PrefixIndex
from chorale.engine.kv_cache.blocks import BlockPool
from chorale.engine.kv_cache.cache import BlockTables, HybridCache
from chorale.engine.kv_cache.hashing import shared_secret
from chorale.engine.kv_cache.index_log import (
    BlocksRemoved,
    BlocksStored,
    IndexCleared,
    IndexEvent,
    IndexLog,
    net_changes,
)
from chorale.engine.types import (
    BASE,
    BlockChanges,
    CacheGroup,
    EngineLimits,
    IntArray,
)
from tests.support.engine.simulation import EOS, VOCAB, Life, random_requests

FULL, WINDOW = CacheGroup.FULL, CacheGroup.WINDOW
HASHES = [bytes([number]) * 16 for number in range(12)]


class Tokens:
    """Token 100 + i at position i."""

    cache_salt = "salt"
    adapter = BASE

    def tokens_between(self, start: int, stop: int) -> IntArray:
        return np.arange(100 + start, 100 + stop, dtype=np.int32)


class Reader:
    """The index that events describe. Fails if a block comes or goes twice. That a block's hash is that of
    its parent and tokens: ``test_kv_publisher.py``."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.index: tuple[set[bytes], set[bytes]] = (set(), set())
        self.host: tuple[set[bytes], set[bytes]] = (set(), set())
        self.num_events = 0

    def read(self, events: list[IndexEvent]) -> None:
        for event in events:
            self.num_events += 1
            if isinstance(event, IndexCleared):
                for index in (*self.index, *self.host):
                    index.clear()
            elif isinstance(event, BlocksRemoved):
                assert len(set(event.hashes)) == len(event.hashes)
                index = (self.index if event.medium == "GPU" else self.host)[event.group]
                assert set(event.hashes) <= index
                index.difference_update(event.hashes)
            else:
                self._store(event)

    def _store(self, event: BlocksStored) -> None:
        if event.medium == "CPU":
            assert event.parent is None
            assert not len(event.token_ids)
            assert not self.host[event.group] & set(event.hashes)
            self.host[event.group].update(event.hashes)
            return
        assert not self.index[event.group] & set(event.hashes)
        assert len(event.token_ids) == len(event.hashes) * self.block_size
        assert event.parent is None or not event.cache_salt
        self.index[event.group].update(event.hashes)


def recorded(num_blocks: int) -> tuple[BlockPool, IndexLog]:
    log = log_on()
    return BlockPool(num_blocks, log=log), log


def log_on() -> IndexLog:
    log = IndexLog()
    log.is_on = True
    return log


def test_a_run_of_blocks_is_one_event_with_parent_tokens_and_salt() -> None:
    cache, tables = HybridCache(20, 4, 8), BlockTables()
    cache.log.is_on = True
    cache.grow(tables, 16)
    cache.commit(tables, 11, HASHES[:4], Tokens())  # two whole blocks
    first = cache.log.take()
    assert [(event.group, event.hashes) for event in first if isinstance(event, BlocksStored)] == [
        (FULL, HASHES[:2]),
        (WINDOW, HASHES[:2]),
    ]
    event = first[0]
    assert isinstance(event, BlocksStored)
    assert (event.parent, event.cache_salt, event.medium) == (None, "salt", "GPU")
    assert event.token_ids.tolist() == list(range(100, 108))
    cache.commit(tables, 16, HASHES[:4], Tokens())
    event = cache.log.take()[0]
    assert isinstance(event, BlocksStored)
    assert (event.hashes, event.parent, event.cache_salt) == (HASHES[2:4], HASHES[1], "")
    assert event.token_ids.tolist() == list(range(108, 116))


def test_evictions_of_a_group_are_one_event() -> None:
    pool, events = recorded(4)
    for number in range(4):
        block = pool.allocate()
        pool.publish((FULL, WINDOW)[number % 2], HASHES[number], block)
        pool.release(block)
    for _ in range(4):
        pool.allocate()
    found = events.take()
    assert found == [
        BlocksRemoved(FULL, [HASHES[0], HASHES[2]], "GPU"),
        BlocksRemoved(WINDOW, [HASHES[1], HASHES[3]], "GPU"),
    ]
    assert events.take() == []


def test_no_removal_moves_before_an_arrival_in_the_other_medium() -> None:
    """A subscriber that learns the tokens from the GPU's event must still have them at the CPU's."""
    events, none = log_on(), np.zeros(0, np.int32)
    events.removed(FULL, HASHES[:1], "GPU")
    events.stored(FULL, HASHES[1:2], HASHES[0], none, "CPU")
    events.removed(FULL, HASHES[1:2], "GPU")
    events.removed(FULL, HASHES[3:4], "CPU")
    events.removed(FULL, HASHES[2:3], "GPU")
    kinds = [type(event).__name__ for event in events.take()]
    assert kinds == ["BlocksRemoved", "BlocksStored", "BlocksRemoved", "BlocksRemoved"]


def test_unpublished_and_forgotten_blocks_are_reported() -> None:
    cache = HybridCache(4, 4, 8)
    cache.log.is_on = True
    for number in range(3):
        cache.pool.publish(FULL, HASHES[number], cache.pool.allocate())
    cache.invalidate([HASHES[0], HASHES[5]])  # the second was never there
    cache.forget_all()
    assert cache.log.take() == [BlocksRemoved(FULL, HASHES[:1], "GPU"), IndexCleared()]


def test_a_follower_gets_the_last_state_of_each_block_on_the_device() -> None:
    log, none = log_on(), np.zeros(0, np.int32)
    log.stored(FULL, HASHES[:2], None, none, "GPU")
    log.stored(WINDOW, HASHES[:1], None, none, "GPU")
    log.removed(FULL, HASHES[1:2], "GPU")
    log.removed(FULL, HASHES[:1], "CPU")
    assert net_changes(log.take()) == BlockChanges(HASHES[0], HASHES[1], HASHES[0], b"")
    log.removed(FULL, HASHES[:1], "GPU")
    log.cleared()
    log.stored(FULL, HASHES[2:3], None, none, "GPU")
    assert net_changes(log.take()) == BlockChanges(HASHES[2], b"", b"", b"", is_cleared=True)
    log.stored(FULL, HASHES[3:4], None, none, "CPU")
    assert net_changes(log.take()) is None


def test_nothing_is_recorded_while_nobody_reads() -> None:
    log = IndexLog()
    log.stored(FULL, HASHES[:2], None, np.zeros(0, np.int32), "GPU")
    log.removed(FULL, HASHES[:1], "GPU")
    log.cleared()
    assert log.take() == []


def test_a_shared_secret_depends_on_the_environment_alone() -> None:
    fixed = shared_secret({})
    assert shared_secret({"PYTHONHASHSEED": "random"}) == shared_secret({"PYTHONHASHSEED": ""}) == fixed
    seeded = shared_secret({"PYTHONHASHSEED": "42"})
    assert shared_secret({"PYTHONHASHSEED": "42", "CHORALE_PREFIX_SECRET": "x"}) != seeded != fixed
    assert len({fixed, seeded, shared_secret({"CHORALE_PREFIX_SECRET": "x"})}) == 3
    assert all(1 <= len(secret) <= 64 for secret in (fixed, seeded))  # blake2b's keys


@pytest.mark.parametrize(("caching", "slots"), [(True, 0), (False, 0), (True, 20), (True, 400)])
def test_events_replay_to_the_index_of_a_busy_engine(caching: bool, slots: int) -> None:
    """Random requests over a pool that is too small: evictions, preemption, aborts, two salts, a reset."""
    rng = random.Random(5)
    limits = EngineLimits(
        num_blocks=48, block_size=4, max_num_seqs=6, max_num_batched_tokens=32, max_model_len=100,
        sliding_window=9, enable_prefix_caching=caching, eos_token_ids=EOS, vocab_size=VOCAB,
        async_scheduling=True, num_host_slots=slots, max_saved_pages=8,
    )  # fmt: skip
    life = Life(limits)
    tier = life.core._engine.cache.tier
    core, pool = life.core, life.core._engine.cache.pool
    log = core.index_log
    core.log_index()
    follower = PrefixIndex(core.prefix_index())
    reader = Reader(4)
    requests = random_requests(rng, limits, life.max_len)
    for number in range(90):
        life.add(next(requests))
        for _ in range(rng.randint(1, 12)):
            life.step()
            events = log.take()
            reader.read(events)
            if (changes := net_changes(events)) is not None:
                follower.apply(changes)
            if caching:
                assert (set(pool.published(FULL)), set(pool.published(WINDOW))) == reader.index
            assert (follower.full, follower.window_hashes) == reader.index
            if tier is not None:
                assert tuple(set(tier.slots.published(group)) for group in CacheGroup) == reader.host
        if rng.random() < 0.2 and (name := life.unfinished_sample(rng)) is not None:
            life.abort(name)
        if number == 60:
            core._engine.cache.forget_all()
            follower = PrefixIndex(core.prefix_index()) if caching else follower  # in the middle of a batch
    assert core.stats().num_preemptions > 5
    assert (reader.num_events > 500) == caching
    assert (core.stats().num_host_loads > 10) == bool(slots)
    if not caching:
        assert reader.num_events == 0
