"""HybridCache: two block tables per sequence over one pool of equal blocks.

Half of the layers attend to all tokens (FULL), half to the last ``window`` tokens (WINDOW). A sequence writes
each new token into a block of each group. WINDOW blocks that no later query can see are released as the
sequence grows. They keep their content until they are evicted, so that they can serve prefix hits.

Index arithmetic, with ``bs`` the block size and ``W`` the window (a token sees itself and the W - 1 tokens
before it): the query at position p reads WINDOW positions [p - (W - 1), p]. Once ``c`` tokens are computed,
the next query is at c, so a block is needed while its last position is >= c - (W - 1). ``commit`` is called
for every prefill chunk and whenever a decoding row has filled a block. A sequence needs new blocks only at
those moments, so ``capacity`` counts exactly the blocks held then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from chorale.engine.kv_cache.blocks import BlockPool, ObservedPool
from chorale.engine.kv_cache.host_tier import SPACING, HostTier
from chorale.engine.kv_cache.index_log import IndexLog, TokenSource
from chorale.engine.kv_cache.prefix import EitherOf, first_window_block, usable_prefix
from chorale.engine.types import BlockChanges, CacheGroup, PrefixIndexState

FULL, WINDOW = CacheGroup.FULL, CacheGroup.WINDOW


@dataclass(slots=True)
class BlockTables:
    """The two block tables of one sequence. ``full[i]`` and ``window[i - window_start]`` are block i.

    Both tables end at the same logical block. The first ``num_published`` blocks are in the prefix index.
    """

    full: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    window_start: int = 0
    num_published: int = 0


class HybridCache:
    """The only writer of block tables; ``pool`` is the only writer of ids and counts."""

    __slots__ = (
        "_resumed_from", "_spacing", "block_size", "log", "max_window_blocks", "pool", "tier", "window",
    )  # fmt: skip

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        window: int,
        num_host_slots: int = 0,
        max_saved_pages: int = 0,
        observed: float = 0.0,
    ) -> None:
        """``num_host_slots``: pages that host memory holds. ``max_saved_pages``: pages written to it before a
        step, at most. ``observed``: share of the blocks whose lives are measured."""
        self.log = log = IndexLog()
        self.tier = HostTier(num_host_slots, num_blocks, max_saved_pages, log) if num_host_slots else None
        own = num_blocks, log, None if self.tier is None else self.tier.evicted
        self.pool = ObservedPool(*own, share=observed) if observed else BlockPool(*own)
        self.block_size = block_size
        self.window = window
        # Most blocks that W consecutive positions can touch.
        self.max_window_blocks = -(-(window - 1) // block_size) + 1
        # A sequence that resumes after ``_spacing`` WINDOW blocks needs the last of them.
        self._spacing = max(1, SPACING * window // block_size)
        self._resumed_from = self._spacing + (1 - window) // block_size

    def block_stats(self) -> dict[str, Any]:
        """Return the fields of ``EngineStats`` about the lives of blocks; empty if none are observed."""
        pool = self.pool
        if not isinstance(pool, ObservedPool):
            return {}
        found = {"block_lifetimes": pool.lifetimes, "block_idle": pool.idle, "block_gaps": pool.gaps}
        return {name: counts.values for name, counts in found.items()}

    @property
    def capacity(self) -> int:
        """Returns how many tokens one sequence can hold if it has the whole pool and grows token by token."""
        num_blocks, window_blocks = self.pool.num_blocks, self.max_window_blocks
        full_blocks = num_blocks - window_blocks if num_blocks >= 2 * window_blocks else num_blocks // 2
        return full_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_window_block(self, num_computed: int) -> int:
        """Return the first logical block that the query at ``num_computed``, or a later one, can see."""
        return first_window_block(num_computed, self.window, self.block_size)

    # ------------------------------------------------------------------ prefix hits

    def lookup(self, block_hashes: Sequence[bytes], *, with_host: bool = False) -> int:
        """Return the length, in blocks, of the longest prefix of ``block_hashes`` that both groups can serve.

        FULL must have every block of it, WINDOW the blocks that the query after it can see. ``with_host``: as
        if the device also had the pages in host memory.
        """
        full, window = (
            EitherOf(self.pool.published(group), self.tier.slots.published(group))
            if with_host and self.tier is not None
            else self.pool.published(group)
            for group in CacheGroup
        )
        end = 0
        while end < len(block_hashes) and block_hashes[end] in full:
            end += 1
        return usable_prefix(block_hashes, end, window, self.window, self.block_size)

    def blocks_to_admit(self, block_hashes: Sequence[bytes], hit: int, num_tokens: int) -> int:
        """Return how many free blocks a sequence of ``num_tokens`` needs after a hit of ``hit`` blocks.

        Counts FULL blocks for all tokens, the WINDOW blocks held at the end, and blocks of the hit that no
        sequence holds now, because they leave the free list when they are shared.
        """
        first = self.first_window_block(hit * self.block_size)
        refs, find = self.pool.refs, self.pool.find
        idle = 0
        for index in range(hit):
            block = find(FULL, block_hashes[index])
            idle += block is not None and refs(block) == 0
            if index >= first:
                block = find(WINDOW, block_hashes[index])
                idle += block is not None and refs(block) == 0
        return self.new_blocks(hit, num_tokens) + idle

    def new_blocks(self, hit: int, num_tokens: int) -> int:
        """Return how many blocks outside its hit a sequence of ``num_tokens`` holds."""
        full = self.blocks_for(num_tokens)
        of_hit = hit - self.first_window_block(hit * self.block_size)
        return full - hit + max(0, min(full, self.max_window_blocks) - of_hit)

    def attach_prefix(self, blocks: BlockTables, block_hashes: Sequence[bytes], hit: int) -> None:
        """Attach the blocks of a hit that ``lookup`` found to a sequence's tables."""
        blocks.window_start = self.first_window_block(hit * self.block_size)
        blocks.num_published = hit
        for index in range(hit):
            self._share(FULL, block_hashes[index], blocks.full)
            if index >= blocks.window_start:
                self._share(WINDOW, block_hashes[index], blocks.window)

    def _share(self, group: CacheGroup, block_hash: bytes, table: list[int]) -> None:
        block = self.pool.find(group, block_hash)
        assert block is not None, "a prefix hit vanished between lookup and attach_prefix"
        self.pool.share(block)
        table.append(block)

    def index_state(self, secret: bytes) -> PrefixIndexState:
        """Return the state that ``lookup`` needs in another process. ``secret``: the key of the block
        hashes."""
        full, window = (b"".join(self.pool.published(group)) for group in CacheGroup)
        return PrefixIndexState(secret, self.block_size, self.window, BlockChanges(full, b"", window, b""))

    # ------------------------------------------------------------------ growth and release

    def room(self, blocks: BlockTables, num_computed: int) -> int:
        """Return how many new tokens fit into the sequence's blocks and the free blocks."""
        slack = len(blocks.full) * self.block_size - num_computed
        return slack + self.pool.num_free // 2 * self.block_size

    def grow(self, blocks: BlockTables, num_tokens: int) -> int:
        """Extend both tables to hold ``num_tokens``. Returns the first new logical block.

        The caller has checked ``room``.
        """
        first = len(blocks.full)
        allocate = self.pool.allocate
        for _ in range(first, self.blocks_for(num_tokens)):
            blocks.full.append(allocate())
            blocks.window.append(allocate())
        return first

    def shrink(self, blocks: BlockTables, num_tokens: int) -> None:
        """Release the blocks of both tables after those that hold ``num_tokens``. They are not published."""
        for _ in range(self.blocks_for(num_tokens), len(blocks.full)):
            self.pool.release(blocks.window.pop())
            self.pool.release(blocks.full.pop())

    def commit(
        self, blocks: BlockTables, num_computed: int, block_hashes: Sequence[bytes], source: TokenSource
    ) -> None:
        """Publish the whole blocks of the first ``num_computed`` tokens, which are in the cache now, and
        release window blocks that are no longer visible.

        ``block_hashes`` covers the whole blocks; it is empty for a sequence whose blocks are not shared.
        ``source``: the sequence, for its tokens in the log.
        """
        publish, start = self.pool.publish, blocks.window_start
        full: list[int] = []
        window: list[int] = []
        for index in range(blocks.num_published, min(len(block_hashes), num_computed // self.block_size)):
            if publish(FULL, block_hashes[index], blocks.full[index]):
                full.append(index)
            if index >= start and publish(WINDOW, block_hashes[index], blocks.window[index - start]):
                window.append(index)
            if self.tier is not None and index >= start and index % self._spacing >= self._resumed_from:
                self._mark_resumed(block_hashes[index])
            blocks.num_published = index + 1
        self.log.published(FULL, full, block_hashes, source, self.block_size)
        self.log.published(WINDOW, window, block_hashes, source, self.block_size)
        unseen = self.first_window_block(num_computed) - start
        if unseen > 0:
            for block in blocks.window[:unseen]:
                self.pool.release(block)
            del blocks.window[:unseen]
            blocks.window_start = start + unseen

    def keep_resumable(
        self, blocks: BlockTables, block_hashes: Sequence[bytes], num_shared: int | None = None
    ) -> None:
        """Mark the blocks that a sequence needs to resume after the published ones, so that host memory keeps
        them.

        ``num_shared``: the resuming prompt may have only this many tokens; its last token is always computed.
        """
        if self.tier is None:
            return
        resumes_at = blocks.num_published
        if num_shared is not None:
            resumes_at = min(resumes_at, (num_shared - 1) // self.block_size)
        first = self.first_window_block(resumes_at * self.block_size)
        for block_hash in block_hashes[first : blocks.num_published]:
            self._mark_resumed(block_hash)

    def _mark_resumed(self, block_hash: bytes) -> None:
        block = self.pool.find(WINDOW, block_hash)
        if block is not None and self.tier is not None:
            self.tier.resumed(block)

    def invalidate(self, block_hashes: Sequence[bytes]) -> None:
        """Remove the blocks of a prefix from the index, no matter which sequence wrote or holds them."""
        for group in CacheGroup:
            for block_hash in block_hashes:
                block = self.pool.unpublish(group, block_hash)
                if self.tier is not None:
                    self.tier.slots.unpublish(group, block_hash)
                    if block is not None:
                        self.tier.unpublished(block)

    def forget_all(self) -> None:
        """Empty the prefix index, on the device and in host memory, because the device's blocks can no longer
        be trusted."""
        if self.tier is not None:
            self.tier.clear()
        self.pool.forget_all()
        self.log.cleared()

    def release(self, blocks: BlockTables) -> None:
        """Release all blocks, the last ones first. They become the oldest free blocks, so a prefix is evicted
        from its end, which fewer requests share."""
        for table in (blocks.window, blocks.full):
            for block in reversed(table):
                self.pool.release(block)
            table.clear()
        blocks.window_start = blocks.num_published = 0
