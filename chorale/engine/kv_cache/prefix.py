"""Finds prefix hits: for the engine's cache, and for clients that follow its index."""

from __future__ import annotations

from collections.abc import Container, Sequence


class EitherOf:
    """Contains the keys of two containers."""

    __slots__ = ("_one", "_other")

    def __init__(self, one: Container[bytes], other: Container[bytes]) -> None:
        self._one, self._other = one, other

    def __contains__(self, key: object) -> bool:
        return key in self._one or key in self._other


def first_window_block(num_computed: int, window: int, block_size: int) -> int:
    """Return the first logical block that queries at ``num_computed`` and later can see in a WINDOW layer."""
    return max(0, num_computed - window + 1) // block_size


def usable_prefix(
    block_hashes: Sequence[bytes], end: int, cached: Container[bytes], window: int, block_size: int
) -> int:
    """Return the longest prefix of at most ``end`` blocks whose WINDOW blocks are ``cached``.

    FULL has every block before ``end``. WINDOW must have the blocks that the query after the prefix can see.
    The search goes from the end and visits each block once: a missing block at i rules out every prefix that
    needs it, so the next candidate ends at i.
    """
    index = end - 1
    while index >= first_window_block(end * block_size, window, block_size) and index >= 0:
        if block_hashes[index] not in cached:
            end = index
        index -= 1
    return end
