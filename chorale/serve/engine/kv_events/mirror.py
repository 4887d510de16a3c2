"""EventMirror: the blocks that subscribers should know, from which late subscribers get a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from chorale.engine.kv_cache.index_log import BlocksRemoved, BlocksStored, IndexCleared, IndexEvent, Medium
from chorale.engine.types import AdapterRef, CacheGroup

EVENTS_PER_BATCH = 256  # blocks in each batch of a snapshot


class _Block(NamedTuple):
    parent: bytes | None
    tokens: bytes  # int32 token ids
    cache_salt: str
    adapter: AdapterRef


class EventMirror:
    """The state after all events so far. It takes about 300 bytes per block of the prefix index."""

    def __init__(self, block_size: int) -> None:
        self._token_bytes = 4 * block_size
        self._blocks: dict[tuple[CacheGroup, Medium], dict[bytes, _Block]] = {}

    def apply(self, events: Iterable[IndexEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                blocks = self._blocks.get((event.group, event.medium), {})
                for block_hash in event.hashes:
                    blocks.pop(block_hash, None)
            else:
                self._blocks.clear()

    def _store(self, event: BlocksStored) -> None:
        blocks = self._blocks.setdefault((event.group, event.medium), {})
        tokens, size = event.token_ids.tobytes(), self._token_bytes
        parent, salt = event.parent, event.cache_salt
        for index, block_hash in enumerate(event.hashes):
            blocks[block_hash] = _Block(
                parent, tokens[index * size : (index + 1) * size], salt, event.adapter
            )
            parent, salt = block_hash, ""

    def snapshot(self) -> Iterator[list[IndexEvent]]:
        """Yields batches of events that clear a subscriber's state and rebuild this one."""
        yield [IndexCleared()]
        for (group, medium), blocks in self._blocks.items():
            known = list(blocks.items())
            for start in range(0, len(known), EVENTS_PER_BATCH):
                yield [
                    BlocksStored(
                        group,
                        (block_hash,),
                        block.parent,
                        np.frombuffer(block.tokens, np.int32),
                        medium,
                        block.cache_salt,
                        block.adapter,
                    )
                    for block_hash, block in known[start : start + EVENTS_PER_BATCH]
                ]
