"""Follower: what a client knows of an engine that it follows: its prefix index, and its load."""

from __future__ import annotations

from collections import deque

from chorale.client.routing.cost import Load
from chorale.client.routing.prefix_index import PrefixIndex
from chorale.client.wire.messages import EngineUpdate, PrefixSnapshot
from chorale.engine.types import EngineStats, GenerateRequest


class Follower:
    """The engine's statistics say how many of this client's requests they include; later ones are added."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget everything: a new engine is followed, or none."""
        self.index: PrefixIndex | None = None
        self._stats = EngineStats()
        self._num_sent = 0
        self._unseen: deque[tuple[int, int, int]] = deque()  # number of the request, its tokens, its choices

    def sent(self, request: GenerateRequest) -> None:
        """Record a request that is sent now."""
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

    def load(self) -> Load:
        stats = self._stats
        tokens = sum(tokens for _, tokens, _ in self._unseen)
        rows = sum(num_choices for _, _, num_choices in self._unseen)
        free: int | None = None
        if self.index is not None and stats.kv_blocks_total:
            free = (stats.kv_blocks_total - stats.kv_blocks_used) * self.index.block_size
        return Load(stats.prompt_tokens_left + tokens, stats.num_running + stats.num_waiting + rows, free)
