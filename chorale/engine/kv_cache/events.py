"""KvEvents: what entered and left the prefix index, in order, for subscribers outside the server.

A follower of the index (``changes.py``) needs only its present state. Events also name each block's parent
and tokens, and report each arrival and departure exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np

from chorale.engine.types import CacheGroup, IntArray

Medium = Literal["GPU", "CPU"]  # where a block's keys and values are
NO_TOKEN_IDS: IntArray = np.zeros(0, np.int32)


class BlocksStored(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks of one chain entered the index of a group.

    ``parent`` is the hash of the block before them; None: they start the chain.
    """

    group: CacheGroup
    hashes: Sequence[bytes]
    parent: bytes | None
    token_ids: IntArray  # of all these blocks; empty for medium "CPU"
    medium: Medium
    cache_salt: str  # of the chain, if these blocks start it


class BlocksRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks left the index of a group."""

    group: CacheGroup
    hashes: list[bytes]
    medium: Medium


class IndexCleared(msgspec.Struct, frozen=True, gc=False):
    """All blocks left the index, of both groups and in every medium."""


KvEvent = BlocksStored | BlocksRemoved | IndexCleared


class TokenSource(Protocol):
    """The sequence whose blocks are published."""

    @property
    def cache_salt(self) -> str: ...

    def tokens_between(self, start: int, stop: int) -> IntArray: ...


def event_hash(block_hash: bytes) -> int:
    """Return the number that stands for a block in events: the low 64 bits of its hash."""
    return int.from_bytes(block_hash[-8:], "big")


class KvEvents:
    """The events since the last ``take``, which must follow every step.

    Removals of one group are joined to one event if nothing else happened to that group in between. Those of
    the WINDOW group are recorded with ``both_groups`` only.
    """

    __slots__ = ("_both_groups", "_events", "_open")

    def __init__(self, *, both_groups: bool = True) -> None:
        self._both_groups = both_groups
        self._events: list[KvEvent] = []
        # The removal that later ones extend. There is none after an arrival in host memory, because a block
        # must not seem to be gone before it is reported there.
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
    ) -> None:
        """Record consecutive blocks of one chain that entered the index. ``token_ids`` is empty for "CPU"."""
        if not self._records(group):
            return
        if medium == "GPU":
            self._open.pop((group, medium), None)
        else:
            self._open.clear()
        self._events.append(BlocksStored(group, hashes, parent, token_ids, medium, cache_salt))

    def removed(self, group: CacheGroup, hashes: Sequence[bytes], medium: Medium) -> None:
        """Record blocks that left the index."""
        if not self._records(group):
            return
        removal = self._open.get((group, medium))
        if removal is not None:
            removal.hashes.extend(hashes)
            return
        removal = BlocksRemoved(group, list(hashes), medium)
        self._open[group, medium] = removal
        self._events.append(removal)

    def _records(self, group: CacheGroup) -> bool:
        return self._both_groups or group is CacheGroup.FULL

    def cleared(self) -> None:
        """Record that the whole index was emptied."""
        self._open.clear()
        self._events.append(IndexCleared())

    def take(self) -> list[KvEvent]:
        """Return the events since the last call. They do not change any more."""
        events, self._events = self._events, []
        self._open.clear()
        return events

    def published(
        self,
        group: CacheGroup,
        indices: Sequence[int],
        block_hashes: Sequence[bytes],
        source: TokenSource | None,
        block_size: int,
    ) -> None:
        """Record blocks of a sequence that entered the index on the device, one event for each run of
        consecutive ones. ``indices``: their places in ``block_hashes``, ascending."""
        if not self._records(group):
            return
        for first, last in _runs(indices):
            self.stored(
                group,
                block_hashes[first : last + 1],
                block_hashes[first - 1] if first else None,
                source.tokens_between(first * block_size, (last + 1) * block_size)
                if source is not None
                else NO_TOKEN_IDS,
                "GPU",
                cache_salt=source.cache_salt if source is not None and first == 0 else "",
            )


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of consecutive integers."""
    if indices and indices[-1] - indices[0] == len(indices) - 1:
        return [(indices[0], indices[-1])]
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1] = runs[-1][0], index
        else:
            runs.append((index, index))
    return runs
