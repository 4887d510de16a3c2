"""HostTier: decides which pages are copied to host memory before their blocks are overwritten.

A FULL page is copied if the host does not have it. A WINDOW page is copied only if a later request is likely
to resume from it: the window before the end of a prompt, the one before the end of a sequence, and one every
``SPACING`` windows of a sequence. A conversation that returns begins with an earlier prompt, and often with
the answer to it; a prompt that diverges anywhere else recomputes less than one spacing.

Copies are listed for the next plan, which makes them before its step writes to the blocks. The slots in host
memory are a ``BlockPool`` too: new pages replace those used least recently, except those of running loads.
"""

from __future__ import annotations

import numpy as np

from chorale.engine.kv_cache.blocks import BlockPool
from chorale.engine.kv_cache.index_log import NO_TOKEN_IDS, IndexLog
from chorale.engine.types import CacheGroup, IntArray

# Sliding windows between two positions at which any sequence can resume. Keeping them takes 6 % more pages.
SPACING = 16


class HostTier:
    """Decides on copies, and owns the slots. The device's pool reports the pages that it evicts."""

    __slots__ = ("_is_resumed", "_log", "_most", "_of_load", "_saved", "num_dropped", "num_saved", "slots")

    def __init__(self, num_slots: int, num_blocks: int, max_saved_pages: int, log: IndexLog) -> None:
        """``max_saved_pages``: copies of one plan, at most. Further pages are dropped."""
        self._log = log
        self.slots = BlockPool(num_slots, log, medium="CPU")
        self._most = max_saved_pages
        self._is_resumed = bytearray(num_blocks)  # 1 for WINDOW blocks that a request may resume from
        self._saved: dict[int, int] = {}  # slot -> block, for the next plan
        self._of_load: dict[int, int] | None = None  # the same, for the load that is taking blocks now
        self.num_saved = 0
        self.num_dropped = 0

    def resumed(self, block: int) -> None:
        """Note that a later request probably needs this WINDOW block."""
        self._is_resumed[block] = 1

    def unpublished(self, block: int) -> None:
        """Note that the block left the prefix index."""
        self._is_resumed[block] = 0

    def evicted(self, group: CacheGroup, block_hash: bytes, block: int) -> None:
        """Copy a block that leaves the prefix index, if it is worth it. The next step may overwrite the
        block."""
        is_wanted = group is CacheGroup.FULL or self._is_resumed[block]
        self._is_resumed[block] = 0
        slot = self.slots.find(group, block_hash)
        if slot is not None:
            self.slots.share(slot)  # it becomes the one used last
            self.slots.release(slot)
        elif is_wanted:
            self._save(group, block_hash, block)

    def _save(self, group: CacheGroup, block_hash: bytes, block: int) -> None:
        slots, has_room = self.slots, self._of_load is not None or len(self._saved) < self._most
        if not has_room or not slots.num_free:
            self.num_dropped += 1
            return
        slot = slots.allocate()
        slots.publish(group, block_hash, slot)
        slots.release(slot)
        self._log.stored(group, [block_hash], None, NO_TOKEN_IDS, "CPU")
        self.num_saved += 1
        if self._of_load is None:
            self._saved[slot] = block
        else:
            self._of_load[slot] = block

    def take_saved(self) -> dict[int, int]:
        """Return the copies added since the last call: slot -> block."""
        saved, self._saved = self._saved, {}
        return saved

    def begin_load(self) -> None:
        """From now on, blocks are evicted by a load, which makes the copies itself, without a maximum."""
        self._of_load = {}

    def end_load(self) -> dict[int, int]:
        """Return the copies added since ``begin_load``: slot -> block."""
        saved, self._of_load = self._of_load, None
        assert saved is not None
        return saved

    def clear(self) -> None:
        """Forget every page."""
        self.slots.forget_all()
        self._saved = {}
        self._is_resumed = bytearray(len(self._is_resumed))


def columns(saved: dict[int, int]) -> tuple[IntArray, IntArray]:
    """Return the slots and the blocks of copies as arrays."""
    count = len(saved)
    return np.fromiter(saved.keys(), np.int32, count), np.fromiter(saved.values(), np.int32, count)
