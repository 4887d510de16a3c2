"""Follower: a client's copy of an engine's prefix index, and an estimate of the engine's backlog."""

from __future__ import annotations

from collections import deque

from chorale.client.routing.cost import Backlog
from chorale.client.routing.prefix_index import PrefixIndex
from chorale.client.wire.messages import EngineUpdate, PrefixSnapshot
from chorale.engine.types import EngineStats, GenerateRequest


class Follower:
    """The engine reports how many of this client's requests its statistics include; later ones are added."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget everything, because the engine was lost or a new one is followed."""
        self.index: PrefixIndex | None = None
        self._stats = EngineStats()
        self._num_sent = 0
        self._unseen: deque[tuple[int, int, int]] = deque()  # not in _stats yet: (number, tokens, choices)

    def sent(self, request: GenerateRequest) -> None:
        """Record a request that is being sent."""
        self._num_sent += 1
        tokens = len(request.prompt_token_ids) - request.num_expected_cached
        self._unseen.append((self._num_sent, tokens, request.sampling.n))

    def receive(self, message: PrefixSnapshot | EngineUpdate) -> None:
        if isinstance(message, PrefixSnapshot):
            self.index = PrefixIndex(message.index)
        elif message.changes is not None and self.index is not None:
            self.index.apply(message.changes)
        self._stats = message.stats
        while self._unseen and self._unseen[0][0] <= message.num_received:
            self._unseen.popleft()

    def backlog(self) -> Backlog:
        stats = self._stats
        tokens = sum(tokens for _, tokens, _ in self._unseen)
        rows = sum(num_choices for _, _, num_choices in self._unseen)
        free: int | None = None
        if self.index is not None and stats.kv_blocks_total:
            free = (stats.kv_blocks_total - stats.kv_blocks_used) * self.index.block_size
        return Backlog(stats.prompt_tokens_left + tokens, stats.num_running + stats.num_waiting + rows, free)
