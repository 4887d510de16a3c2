"""PrefixIndex: a copy of one engine's prefix index, and the search for a prompt's longest hit in several.

Hashes and hits are computed by the engine's own functions, so a hit found here equals the engine's
``num_cached_tokens``, unless blocks were added or evicted in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from chorale.engine.kv_cache.hashing import extend_chain, salted_root
from chorale.engine.kv_cache.index_log import split_hashes
from chorale.engine.kv_cache.prefix import usable_prefix
from chorale.engine.types import BlockChanges, GenerateRequest, PrefixIndexState

FIRST_BATCH, BATCH = 4, 32  # blocks hashed per look-up: smallest and largest batch


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
    """The prompt's hashes under one secret, and how many of them each index with this secret has."""

    __slots__ = ("_block_size", "_open", "_root", "ends", "hashes")

    def __init__(self, index: PrefixIndex, request: GenerateRequest) -> None:
        self._root = salted_root(index.secret, request.cache_salt, request.adapter.id)
        self._block_size = index.block_size
        self._open: list[tuple[int, set[bytes]]] = []  # (position, hashes) of indexes with every block so far
        self.hashes: list[bytes] = []
        self.ends: dict[int, int] = {}  # position of the index -> number of leading blocks that it has

    def add(self, position: int, index: PrefixIndex) -> None:
        self._open.append((position, index.full))
        self.ends[position] = 0

    def advance(self, prompt: Sequence[int], num_blocks: int) -> bool:
        """Hash and look up at most ``num_blocks`` more blocks. Returns whether all ``ends`` are final."""
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

    def _follows(self, position: int, full: set[bytes], start: int) -> bool:
        end, hashes = start, self.hashes
        while end < len(hashes) and hashes[end] in full:
            end += 1
        self.ends[position] = end
        return end == len(hashes)


class PrefixSearch:
    """The hit of one prompt in each of several indexes; None is an index without hits. Blocks are hashed as
    long as any index has them, once for all indexes with the same secret.
    """

    def __init__(self, request: GenerateRequest, indexes: Sequence[PrefixIndex | None]) -> None:
        self._prompt, self._indexes = request.prompt_token_ids, indexes
        self._chains: dict[tuple[bytes, int], _Chain] = {}
        if request.sampling.computes_prompt:
            return  # the engine computes the whole prompt
        for position, index in enumerate(indexes):
            if index is not None and index.secret:
                key = (index.secret, index.block_size)
                if key not in self._chains:
                    self._chains[key] = _Chain(index, request)
                self._chains[key].add(position, index)

    def advance(self, num_blocks: int) -> bool:
        """Hash at most ``num_blocks`` more blocks for each secret. Returns whether the search has ended."""
        try:
            done = [chain.advance(self._prompt, num_blocks) for chain in self._chains.values()]
            return all(done)
        except OverflowError:  # ids above 32 bits: the engine refuses them
            self._chains.clear()
            return True

    def hits(self) -> list[int]:
        """Returns the number of cached tokens in each index, as far as the search has got."""
        found = [0] * len(self._indexes)
        for chain in self._chains.values():
            for position, end in chain.ends.items():
                index = self._indexes[position]
                if index is not None:
                    size = index.block_size
                    hit = usable_prefix(chain.hashes, end, index.window_hashes, index.window, size)
                    found[position] = hit * size
        return found
