"""HybridCache: two page tables a sequence over one pool of equal pages.

Half of the layers attend to everything (FULL), half to the last ``window`` tokens (WINDOW). A sequence
writes each new token into a page of either group; WINDOW pages that no later query can see are given back
as it moves on, and keep their content until they are evicted, so that they can serve prefix hits.

Index arithmetic, with ``bs`` the block size and ``W`` the window (a token sees itself and W - 1 before):
the query at position p reads WINDOW positions [p - (W - 1), p]. Once ``c`` tokens are computed, the next
query is at c, so a page is needed while its last position is >= c - (W - 1). ``commit`` is called for every
prefill chunk and whenever a decoding row has filled a page; that is also when it may need new ones, so
``capacity`` counts exactly what is held at those moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chorale.engine.kv_cache.blocks import BlockPool
from chorale.engine.types import CacheGroup

FULL, WINDOW = CacheGroup.FULL, CacheGroup.WINDOW


@dataclass(slots=True)
class Pages:
    """The two page tables of one sequence. ``full[i]`` and ``window[i - window_start]`` are page i.

    Both tables end at the same logical page. The first ``num_published`` pages are in the prefix index.
    """

    full: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    window_start: int = 0
    num_published: int = 0


class HybridCache:
    """All changes to page tables go through here; ``pool`` is the one writer of ids and counts."""

    __slots__ = ("block_size", "max_window_pages", "pool", "window")

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.window = window
        # Pages that W consecutive positions can touch, in the worst alignment.
        self.max_window_pages = -(-(window - 1) // block_size) + 1

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can hold when it has the pool to itself and moves a token at a time."""
        num_blocks, window_pages = self.pool.num_blocks, self.max_window_pages
        full_pages = num_blocks - window_pages if num_blocks >= 2 * window_pages else num_blocks // 2
        return full_pages * self.block_size

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_window_page(self, num_computed: int) -> int:
        """The first logical page that the query at ``num_computed``, or a later one, can see."""
        return max(0, num_computed - self.window + 1) // self.block_size

    # ------------------------------------------------------------------ prefix hits

    def lookup(self, digests: Sequence[bytes]) -> int:
        """The longest prefix, in pages, that both groups can serve; ``digests`` bounds it.

        FULL must have every page of it, WINDOW those that the query after it can see. The walk down the
        window pages visits each once: a missing page at i rules out every prefix that needs it, so the
        next candidate ends at i.
        """
        find = self.pool.find
        end = 0
        while end < len(digests) and find(FULL, digests[end]) is not None:
            end += 1
        page = end - 1
        while page >= self.first_window_page(end * self.block_size) and page >= 0:
            if find(WINDOW, digests[page]) is None:
                end = page
            page -= 1
        return end

    def pages_to_admit(self, digests: Sequence[bytes], hit: int, num_tokens: int) -> int:
        """Free pages that a sequence of ``num_tokens`` takes after a hit of ``hit`` pages.

        Counts FULL pages for all of it, the WINDOW pages it ends up with, and pages of the hit that nobody
        holds now (they leave the free list when they are shared).
        """
        full = self.num_pages(num_tokens)
        first = self.first_window_page(hit * self.block_size)
        window = max(0, min(full, self.max_window_pages) - (hit - first))
        refs, find = self.pool.refs, self.pool.find
        idle = 0
        for page in range(hit):
            block = find(FULL, digests[page])
            idle += block is not None and refs(block) == 0
            if page >= first:
                block = find(WINDOW, digests[page])
                idle += block is not None and refs(block) == 0
        return full - hit + window + idle

    def adopt(self, pages: Pages, digests: Sequence[bytes], hit: int) -> None:
        """Take a share of the pages of a hit that ``lookup`` found."""
        pages.window_start = self.first_window_page(hit * self.block_size)
        pages.num_published = hit
        for page in range(hit):
            self._share(FULL, digests[page], pages.full)
            if page >= pages.window_start:
                self._share(WINDOW, digests[page], pages.window)

    def _share(self, group: CacheGroup, digest: bytes, table: list[int]) -> None:
        block = self.pool.find(group, digest)
        assert block is not None, "a prefix hit vanished between lookup and adopt"
        self.pool.share(block)
        table.append(block)

    # ------------------------------------------------------------------ growth and release

    def room(self, pages: Pages, num_computed: int) -> int:
        """New tokens that fit in the sequence's own pages and the free ones."""
        slack = len(pages.full) * self.block_size - num_computed
        return slack + self.pool.num_free // 2 * self.block_size

    def grow(self, pages: Pages, num_tokens: int) -> int:
        """Extend both tables to hold ``num_tokens``. Returns the first new logical page.

        The caller has checked ``room``.
        """
        first = len(pages.full)
        allocate = self.pool.allocate
        for _ in range(first, self.num_pages(num_tokens)):
            pages.full.append(allocate())
            pages.window.append(allocate())
        return first

    def commit(self, pages: Pages, num_computed: int, digests: Sequence[bytes]) -> None:
        """``num_computed`` tokens are really in the cache now: publish whole pages, free unseen ones.

        ``digests`` covers the whole pages, or is empty for a sequence whose pages are not to be shared.
        """
        publish, start = self.pool.publish, pages.window_start
        for page in range(pages.num_published, min(len(digests), num_computed // self.block_size)):
            publish(FULL, digests[page], pages.full[page])
            if page >= start:
                publish(WINDOW, digests[page], pages.window[page - start])
            pages.num_published = page + 1
        unseen = self.first_window_page(num_computed) - start
        if unseen > 0:
            for block in pages.window[:unseen]:
                self.pool.release(block)
            del pages.window[:unseen]
            pages.window_start = start + unseen

    def distrust(self, digests: Sequence[bytes]) -> None:
        """Take the pages of a prefix out of the index, whoever wrote them and whoever holds them."""
        for group in CacheGroup:
            for digest in digests:
                self.pool.unpublish(group, digest)

    def release(self, pages: Pages) -> None:
        """Give everything back. Last pages first: they become the oldest of the free ones, so a prefix is
        evicted from its end, where fewer requests share it."""
        for table in (pages.window, pages.full):
            for block in reversed(table):
                self.pool.release(block)
            table.clear()
        pages.window_start = pages.num_published = 0
