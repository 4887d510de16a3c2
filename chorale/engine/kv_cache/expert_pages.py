"""ExpertPages: the experts that the router chose for each cached token, beside the KV cache, in host memory.

They are indexed by the block that holds the token's keys and values in the FULL layers, which a sequence
keeps until it ends. Whatever gives a sequence its blocks therefore gives it their experts: a prefix hit, a
chunk, a sibling, a recomputation. Copies of pages to and from host memory are repeated here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chorale.engine.types import ExpertIds, Transfers


class ExpertPages:
    """A page has the expert ids of a block, [block_size, layers, K]. Unwritten pages take no memory."""

    __slots__ = ("_host", "_pages", "_size")

    def __init__(self, num_blocks: int, block_size: int, num_host_slots: int, shape: tuple[int, int]) -> None:
        """``shape``: layers, and experts per token."""
        self._size = block_size
        self._pages: ExpertIds = np.zeros((num_blocks, block_size, *shape), np.uint8)
        self._host: ExpertIds = np.zeros((num_host_slots, block_size, *shape), np.uint8)

    def slots(self, blocks: Sequence[int], start: int, count: int) -> list[int]:
        """Return the places of ``count`` positions of a sequence. ``blocks``: its FULL table."""
        size = self._size
        return [blocks[place // size] * size + place % size for place in range(start, start + count)]

    def write(self, slots: list[int], ids: ExpertIds) -> None:
        """Store ``ids`` [T, layers, K] at T places."""
        self._pages.reshape(-1, *ids.shape[1:])[slots] = ids

    def read(self, blocks: Sequence[int], start: int, stop: int) -> bytes:
        """Return the ids of positions [start, stop) of a sequence, in the order [position, layer, K]."""
        first = start // self._size
        found = self._pages[blocks[first : -(-stop // self._size)]]
        offset = first * self._size
        return found.reshape(-1, *found.shape[2:])[start - offset : stop - offset].tobytes()

    def move(self, transfers: Transfers) -> None:
        """Repeat the copies of a plan, before anything is stored for its step or a later one."""
        self._host[transfers.saved_slots] = self._pages[transfers.saved_blocks]
        for load in transfers.loads:
            self._host[load.saved_slots] = self._pages[load.saved_blocks]
            self._pages[load.blocks] = self._host[load.slots]
