"""HostLoads: loads of pages from host memory to the device.

From its start until its sequence is admitted, a load holds the prefix blocks that the device has, so that
they stay, and new blocks for the missing ones. The new blocks enter the prefix index when the load is done.
Until then no other sequence uses them, and the load holds its slots in host memory.

A load that is done keeps its blocks for its sequence only while there is room: ``release`` makes them
ordinary cached blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chorale.engine.kv_cache.cache import HybridCache
from chorale.engine.kv_cache.host_tier import HostTier, columns
from chorale.engine.kv_cache.index_log import TokenSource
from chorale.engine.types import CacheGroup, HostLoad, Transfers

FULL, WINDOW = CacheGroup.FULL, CacheGroup.WINDOW


@dataclass(slots=True, eq=False)
class Load:
    """``hit``: blocks of the prefix on device and host together; ``device_hit``: those on the device
    alone."""

    load_id: int
    block_hashes: Sequence[bytes]
    source: TokenSource  # the tokens of the prefix, for events
    hit: int
    device_hit: int
    num_owed: int  # free blocks that its sequence will still need
    began: float
    held: list[int] = field(default_factory=list)  # blocks, one reference each
    # Group, index in ``block_hashes``, block and slot; ascending in each group.
    pages: list[tuple[CacheGroup, int, int, int]] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)  # slot -> block, before it is overwritten
    is_done: bool = False
    is_released: bool = False  # its sequence no longer needs it
    is_bad: bool = False  # some page must not be used


class HostLoads:
    """The only writer of loads. Blocks come from ``cache``, slots from ``tier``."""

    def __init__(self, cache: HybridCache, tier: HostTier) -> None:
        self._cache, self._tier = cache, tier
        self._running: dict[int, Load] = {}
        self._new: list[Load] = []
        self._finished: list[int] = []  # ids; the next plan may use the blocks of these loads
        self._next_id = 0
        self.num_pages = 0
        self.num_loads = 0
        self.seconds = 0.0

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    @property
    def has_new(self) -> bool:
        """Returns whether a load waits to be put into a plan."""
        return bool(self._new)

    def blocks_to_load(self, block_hashes: Sequence[bytes], hit: int) -> int:
        """Return how many blocks of a prefix the device lacks."""
        find = self._cache.pool.find
        return sum(find(group, block_hashes[index]) is None for group, index in self._keys(hit))

    def begin(
        self,
        block_hashes: Sequence[bytes],
        hit: int,
        device_hit: int,
        num_owed: int,
        now: float,
        source: TokenSource,
    ) -> Load:
        """Load the missing ones of the first ``hit`` blocks; each block is on the device or the host.

        The caller has checked that enough blocks are free.
        """
        pool, slots = self._cache.pool, self._tier.slots
        load = Load(self._next_id, block_hashes[:hit], source, hit, device_hit, num_owed, now)
        self._next_id += 1
        missing: list[tuple[CacheGroup, int, int]] = []
        for group, index in self._keys(hit):
            block_hash = block_hashes[index]
            block = pool.find(group, block_hash)
            if block is not None:
                pool.share(block)
                load.held.append(block)
                continue
            slot = slots.find(group, block_hash)
            assert slot is not None, "a page vanished from host memory between lookup and load"
            slots.share(slot)
            missing.append((group, index, slot))
        self._tier.begin_load()
        for group, index, slot in missing:
            block = pool.allocate()
            load.held.append(block)
            load.pages.append((group, index, block, slot))
        load.saved = self._tier.end_load()
        for slot in load.saved:
            slots.share(slot)
        self._running[load.load_id] = load
        self._new.append(load)
        return load

    def _keys(self, hit: int) -> list[tuple[CacheGroup, int]]:
        first = self._cache.first_window_block(hit * self._cache.block_size)
        return [(FULL, index) for index in range(hit)] + [(WINDOW, index) for index in range(first, hit)]

    def finish(self, load_id: int, now: float) -> Load | None:
        """Publish the pages of a load that has ended. Returns None if the load is unknown, as after
        ``fail``."""
        load = self._running.pop(load_id, None)
        if load is None:
            return None
        self._finished.append(load_id)
        self._release_slots(load)
        load.is_done = True
        self.num_loads += 1
        self.num_pages += len(load.pages)
        self.seconds += now - load.began
        if not load.is_bad:
            self._publish(load)
        if load.is_released or load.is_bad:
            self._release_blocks(load)
        return load

    def _publish(self, load: Load) -> None:
        """Index the pages. If another sequence has indexed the same content, hold its block instead."""
        pool = self._cache.pool
        added: tuple[list[int], list[int]] = ([], [])
        for position, (group, index, block, _) in enumerate(load.pages, len(load.held) - len(load.pages)):
            block_hash = load.block_hashes[index]
            if pool.publish(group, block_hash, block):
                added[group].append(index)
            indexed = pool.find(group, block_hash)
            assert indexed is not None
            if group is WINDOW:
                self._tier.resumed(indexed)
            if indexed != block:
                pool.share(indexed)
                pool.release(block)
                load.held[position] = indexed
        size = self._cache.block_size
        for group in CacheGroup:
            self._cache.log.published(group, added[group], load.block_hashes, load.source, size)

    def release(self, load: Load) -> None:
        """Release the blocks, at once or when the load ends. Repeated calls are harmless."""
        load.is_released = True
        if load.is_done:
            self._release_blocks(load)

    def _release_blocks(self, load: Load) -> None:
        for block in reversed(load.held):  # the first blocks of a prefix are evicted last
            self._cache.pool.release(block)
        load.held.clear()

    def _release_slots(self, load: Load) -> None:
        for _, _, _, slot in reversed(load.pages):
            self._tier.slots.release(slot)
        for slot in load.saved:
            self._tier.slots.release(slot)

    def invalidate(self, block_hashes: Sequence[bytes]) -> None:
        """Prevent running loads of these pages from publishing them."""
        bad = set(block_hashes)
        for load in self._running.values():
            load.is_bad |= any(load.block_hashes[index] in bad for _, index, _, _ in load.pages)

    def fail(self) -> None:
        """Release everything. The next plan waits for the transfers that still run."""
        for load in [*self._running.values()]:
            self._release_slots(load)
            self._release_blocks(load)
            self._finished.append(load.load_id)
            load.is_done = True
        new = {load.load_id for load in self._new}
        self._finished = [load_id for load_id in self._finished if load_id not in new]
        self._running.clear()
        self._new.clear()

    def take_transfers(self) -> Transfers | None:
        """Return the transfers of the next plan, or None if there are none."""
        saved = self._tier.take_saved()
        if not (saved or self._new or self._finished):
            return None
        slots, blocks = columns(saved)
        found = Transfers(slots, blocks, tuple(map(_message, self._new)), tuple(self._finished))
        self._new, self._finished = [], []
        return found

    @property
    def held(self) -> list[int]:
        """The blocks of running loads, once for each reference."""
        return [block for load in self._running.values() for block in load.held]


def _message(load: Load) -> HostLoad:
    pages = {slot: block for _, _, block, slot in load.pages}
    return HostLoad(load.load_id, *columns(pages), *columns(load.saved))
