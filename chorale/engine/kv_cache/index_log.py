"""IndexLog: the blocks that entered and left the prefix index, in order.

It has two readers. Subscribers outside the server get every event, with each block's parent and tokens.
Clients that route by prefix need only the latest state of each block on the device: ``net_changes``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np

from chorale.engine.kv_cache.hashing import HASH_SIZE
from chorale.engine.types import BASE, AdapterRef, BlockChanges, CacheGroup, IntArray

Medium = Literal["GPU", "CPU"]  # the memory that holds a block's keys and values
NO_TOKEN_IDS: IntArray = np.zeros(0, np.int32)


class BlocksStored(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks of one chain entered the index of a group.

    ``parent`` is the hash of the block before them, or None if they start the chain.
    """

    group: CacheGroup
    hashes: Sequence[bytes]
    parent: bytes | None
    token_ids: IntArray  # the tokens of all these blocks; empty for medium "CPU"
    medium: Medium
    cache_salt: str  # the chain's salt, if these blocks start it
    adapter: AdapterRef = BASE  # of the chain; unknown for medium "CPU"


class BlocksRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks left the index of a group."""

    group: CacheGroup
    hashes: list[bytes]
    medium: Medium


class IndexCleared(msgspec.Struct, frozen=True, gc=False):
    """The index was emptied, for both groups and every medium."""


IndexEvent = BlocksStored | BlocksRemoved | IndexCleared


class TokenSource(Protocol):
    """The sequence whose blocks are published."""

    @property
    def cache_salt(self) -> str: ...

    @property
    def adapter(self) -> AdapterRef: ...

    def tokens_between(self, start: int, stop: int) -> IntArray: ...


def event_hash(block_hash: bytes) -> int:
    """Return the number that identifies a block in events: the low 64 bits of its hash."""
    return int.from_bytes(block_hash[-8:], "big")


class IndexLog:
    """The events since the last ``take``, which must follow every step while the log ``is_on``.

    Removals of one group are merged into one event if nothing else happened to that group in between.
    """

    __slots__ = ("_events", "_open", "is_on")

    def __init__(self) -> None:
        self.is_on = False  # whether anybody reads the events
        self._events: list[IndexEvent] = []
        # The removal event that later removals extend. None after an arrival in host memory, because a block
        # must not be reported as removed before it is reported there.
        self._open: dict[tuple[CacheGroup, Medium], BlocksRemoved] = {}

    def stored(
        self,
        group: CacheGroup,
        hashes: Sequence[bytes],
        parent: bytes | None,
        token_ids: IntArray,
        medium: Medium,
        *,
        cache_salt: str = "",
        adapter: AdapterRef = BASE,
    ) -> None:
        """Record consecutive blocks of one chain that entered the index. ``token_ids`` is empty for "CPU"."""
        if not self.is_on:
            return
        if medium == "GPU":
            self._open.pop((group, medium), None)
        else:
            self._open.clear()
        self._events.append(BlocksStored(group, hashes, parent, token_ids, medium, cache_salt, adapter))

    def removed(self, group: CacheGroup, hashes: Sequence[bytes], medium: Medium) -> None:
        """Record blocks that left the index."""
        if not self.is_on:
            return
        removal = self._open.get((group, medium))
        if removal is not None:
            removal.hashes.extend(hashes)
            return
        removal = BlocksRemoved(group, list(hashes), medium)
        self._open[group, medium] = removal
        self._events.append(removal)

    def cleared(self) -> None:
        """Record that the whole index was emptied."""
        if self.is_on:
            self._open.clear()
            self._events.append(IndexCleared())

    def take(self) -> list[IndexEvent]:
        """Return the events since the last call. They no longer change."""
        events, self._events = self._events, []
        self._open.clear()
        return events

    def published(
        self,
        group: CacheGroup,
        indices: Sequence[int],
        block_hashes: Sequence[bytes],
        source: TokenSource,
        block_size: int,
    ) -> None:
        """Record blocks of a sequence that entered the index on the device, one event for each run of
        consecutive ones. ``indices``: their positions in ``block_hashes``, ascending."""
        if not self.is_on:
            return
        for first, last in _runs(indices):
            self.stored(
                group,
                block_hashes[first : last + 1],
                block_hashes[first - 1] if first else None,
                source.tokens_between(first * block_size, (last + 1) * block_size),
                "GPU",
                cache_salt="" if first else source.cache_salt,
                adapter=source.adapter,
            )


def net_changes(events: Iterable[IndexEvent]) -> BlockChanges | None:
    """Return the final state of each device block that ``events`` name, or None if they name none.

    Applying a change twice is harmless, so the state before the events is not needed.
    """
    states: tuple[dict[bytes, bool], dict[bytes, bool]] = ({}, {})
    is_cleared = False
    for event in events:
        if isinstance(event, IndexCleared):
            is_cleared = True
            for each in states:
                each.clear()
        elif event.medium == "GPU":
            states[event.group].update(dict.fromkeys(event.hashes, isinstance(event, BlocksStored)))
    if not is_cleared and not any(states):
        return None
    full, window = states
    return BlockChanges(
        _joined(full, True), _joined(full, False), _joined(window, True), _joined(window, False), is_cleared
    )


def _joined(states: dict[bytes, bool], wanted: bool) -> bytes:
    return b"".join(block_hash for block_hash, state in states.items() if state is wanted)


def split_hashes(joined: bytes) -> list[bytes]:
    """Split a byte string of concatenated hashes."""
    return [joined[start : start + HASH_SIZE] for start in range(0, len(joined), HASH_SIZE)]


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last integer of each run of consecutive integers."""
    if indices and indices[-1] - indices[0] == len(indices) - 1:
        return [(indices[0], indices[-1])]
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1] = runs[-1][0], index
        else:
            runs.append((index, index))
    return runs
