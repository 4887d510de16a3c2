"""HostSlots: the index of the pages in host memory, and their LRU order.

A slot is in exactly one state:

    free     no content
    used     in the index; new content may replace it, the least recently used first
    pinned   a load reads or writes it: never replaced. In the index, unless it was removed meanwhile
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from chorale.engine.kv_cache.index_log import NO_TOKEN_IDS, IndexLog
from chorale.engine.types import CacheGroup


class HostSlots:
    """Slots ``0 .. num_slots - 1`` and their contents. Operations on one slot are O(1)."""

    __slots__ = ("_free", "_index", "_key", "_log", "_pins", "_used", "num_slots")

    def __init__(self, num_slots: int, log: IndexLog | None = None) -> None:
        self.num_slots = num_slots
        self._log = IndexLog() if log is None else log
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: low slots first
        self._used: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._pins: dict[int, int] = {}
        self._index: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})
        self._key: list[tuple[CacheGroup, bytes] | None] = [None] * num_slots

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def published(self, group: CacheGroup) -> Mapping[bytes, int]:
        """The index of a group. Read only."""
        return self._index[group]

    def find(self, group: CacheGroup, block_hash: bytes) -> int | None:
        return self._index[group].get(block_hash)

    def take(self, group: CacheGroup, block_hash: bytes) -> int | None:
        """Return a slot for a page that the index does not have, and index it. Returns None if all slots are
        pinned."""
        if self._free:
            slot = self._free.pop()
        elif self._used:
            slot, _ = self._used.popitem(last=False)
            self._remove_key(slot)
        else:
            return None
        self._key[slot] = (group, block_hash)
        self._index[group][block_hash] = slot
        self._used[slot] = None
        self._log.stored(group, [block_hash], None, NO_TOKEN_IDS, "CPU")
        return slot

    def touch(self, slot: int) -> None:
        """Mark a slot as most recently used."""
        if slot in self._used:
            self._used.move_to_end(slot)

    def pin(self, slot: int) -> None:
        self._pins[slot] = self._pins.get(slot, 0) + 1
        self._used.pop(slot, None)

    def unpin(self, slot: int) -> None:
        left = self._pins[slot] - 1
        if left:
            self._pins[slot] = left
            return
        del self._pins[slot]
        if self._key[slot] is None:
            self._free.append(slot)
        else:
            self._used[slot] = None

    def forget(self, group: CacheGroup, block_hash: bytes) -> None:
        """Remove a page from the index. Unknown hashes are ignored."""
        slot = self._index[group].get(block_hash)
        if slot is None:
            return
        self._remove_key(slot)
        if slot not in self._pins:
            del self._used[slot]
            self._free.append(slot)

    def clear(self) -> None:
        """Empty the index. This is not logged: the caller empties the device's index too, and logs that."""
        for index in self._index:
            index.clear()
        self._key = [None] * self.num_slots
        self._free.extend(self._used)
        self._used.clear()

    def _remove_key(self, slot: int) -> None:
        key = self._key[slot]
        assert key is not None
        group, block_hash = key
        del self._index[group][block_hash]
        self._key[slot] = None
        self._log.removed(group, [block_hash], "CPU")
