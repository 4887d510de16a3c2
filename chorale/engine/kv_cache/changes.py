"""IndexChanges: what a prefix index gained and lost since somebody last asked."""

from __future__ import annotations

from chorale.engine.kv_cache.hashing import HASH_SIZE
from chorale.engine.types import BlockChanges, CacheGroup


class IndexChanges:
    """The net changes of both groups: a block that came and went leaves one entry, its last state.

    Keys are (group, hash); the value says whether the hash is in the index now. Repeating a change that the
    reader has seen is harmless, so no earlier state is kept.
    """

    __slots__ = ("_states",)

    def __init__(self) -> None:
        self._states: tuple[dict[bytes, bool], dict[bytes, bool]] = ({}, {})

    def add(self, group: CacheGroup | int, block_hash: bytes) -> None:
        self._states[group][block_hash] = True

    def remove(self, group: CacheGroup | int, block_hash: bytes) -> None:
        self._states[group][block_hash] = False

    def take(self) -> BlockChanges | None:
        """Return the changes since the last call, or None if there are none."""
        if not any(self._states):
            return None
        parts = [
            b"".join(block_hash for block_hash, is_there in self._states[group].items() if is_there is wanted)
            for group in CacheGroup
            for wanted in (True, False)
        ]
        for states in self._states:
            states.clear()
        return BlockChanges(*parts)


def split_hashes(joined: bytes) -> list[bytes]:
    """The hashes of a string that holds one after the other."""
    return [joined[start : start + HASH_SIZE] for start in range(0, len(joined), HASH_SIZE)]
