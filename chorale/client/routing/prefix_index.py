"""PrefixIndex: a copy of one engine's prefix index, and the search for a prompt's longest hit in several.

The hashes, the root and the rule of a hit are the engine's own functions, so that a hit found here is what
the engine reports as ``num_cached_tokens``, unless blocks came or went in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from chorale.engine.kv_cache.hashing import extend_chain, salted_root
from chorale.engine.kv_cache.index_log import split_hashes
from chorale.engine.kv_cache.prefix import usable_prefix
from chorale.engine.types import BlockChanges, GenerateRequest, PrefixIndexState

FIRST_BATCH, BATCH = 4, 32  # blocks that are hashed before they are looked up


class PrefixIndex:
    """The hashes that an engine has published, by cache group."""

    __slots__ = ("block_size", "full", "secret", "window", "window_hashes")

    def __init__(self, state: PrefixIndexState) -> None:
        self.secret, self.block_size, self.window = state.secret, state.block_size, state.window
        self.full: set[bytes] = set()
        self.window_hashes: set[bytes] = set()
        self.apply(state.blocks)

    def apply(self, changes: BlockChanges) -> None:
        if changes.is_cleared:
            self.full.clear()
            self.window_hashes.clear()
        self.full.difference_update(split_hashes(changes.full_removed))
        self.full.update(split_hashes(changes.full_added))
        self.window_hashes.difference_update(split_hashes(changes.window_removed))
        self.window_hashes.update(split_hashes(changes.window_added))


class _Chain:
    """The prompt's hashes under one secret, and how far each index that has this secret follows them."""

    __slots__ = ("_block_size", "_open", "_root", "ends", "hashes")

    def __init__(self, index: PrefixIndex, cache_salt: str) -> None:
        self._root, self._block_size = salted_root(index.secret, cache_salt), index.block_size
        self._open: list[tuple[int, set[bytes]]] = []  # (place, hashes) of those that had every block so far
        self.hashes: list[bytes] = []
        self.ends: dict[int, int] = {}

    def add(self, place: int, index: PrefixIndex) -> None:
        self._open.append((place, index.full))
        self.ends[place] = 0

    def advance(self, prompt: Sequence[int], num_blocks: int) -> bool:
        """Hash and look up at most ``num_blocks`` more. Returns whether the end is known."""
        size, hashes = self._block_size, self.hashes
        most = (len(prompt) - 1) // size  # the last token is always computed
        stop = min(len(hashes) + num_blocks, most)
        while self._open and len(hashes) < stop:
            start = len(hashes)
            end = min(start + min(BATCH, max(FIRST_BATCH, start)), stop)
            tokens = array("i", prompt[start * size : end * size]).tobytes()
            extend_chain(hashes, self._root, tokens, 4 * size)
            self._open = [each for each in self._open if self._follows(*each, start)]
        return not self._open or len(hashes) >= most

    def _follows(self, place: int, full: set[bytes], start: int) -> bool:
        end, hashes = start, self.hashes
        while end < len(hashes) and hashes[end] in full:
            end += 1
        self.ends[place] = end
        return end == len(hashes)


class PrefixSearch:
    """The hit of one prompt in each of several indexes; None has none. Blocks are hashed as long as any has
    them, once for all indexes with the same secret.
    """

    def __init__(self, request: GenerateRequest, indexes: Sequence[PrefixIndex | None]) -> None:
        self._prompt, self._indexes = request.prompt_token_ids, indexes
        self._chains: dict[tuple[bytes, int], _Chain] = {}
        if request.sampling.prompt_logprobs is not None:
            return  # the engine computes the whole prompt
        for place, index in enumerate(indexes):
            if index is not None and index.secret:
                key = (index.secret, index.block_size)
                if key not in self._chains:
                    self._chains[key] = _Chain(index, request.cache_salt)
                self._chains[key].add(place, index)

    def advance(self, num_blocks: int) -> bool:
        """Hash at most ``num_blocks`` more, for each secret. Returns whether the search is over."""
        try:
            done = [chain.advance(self._prompt, num_blocks) for chain in self._chains.values()]
            return all(done)
        except OverflowError:  # ids that no vocabulary has: the engine refuses them
            self._chains.clear()
            return True

    def hits(self) -> list[int]:
        """Tokens that each index has cached, as far as the search got."""
        found = [0] * len(self._indexes)
        for chain in self._chains.values():
            for place, end in chain.ends.items():
                index = self._indexes[place]
                if index is not None:
                    size = index.block_size
                    hit = usable_prefix(chain.hashes, end, index.window_hashes, index.window, size)
                    found[place] = hit * size
        return found
