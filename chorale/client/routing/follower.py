"""Follower: a client's copy of an engine's prefix index, and an estimate of the engine's backlog.

``cost``: the cost of one more request on it. The unit is one prompt token to compute.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from chorale.client.routing.prefix_index import PrefixIndex
from chorale.client.wire.messages import EngineUpdate, PrefixSnapshot
from chorale.engine.types import EngineStats, GenerateRequest

# Cost of one running row, in prompt tokens. A row makes each of about 200 steps 0.04 to 0.2 ms longer for the
# other rows (120b on one H200, docs/reference/benchmarks.md); computing one prompt token takes 0.02 ms.
ROW_TOKENS = 512
# Above this number of rows, a row costs more than twice as much, so that requests with one long prefix
# spread: a second replica computes the prefix once, and then has it cached, too.
CROWD = 32
SHORTAGE = 4  # cost of a token that the free KV cache has no room for: it waits, or others are preempted


@dataclass(frozen=True, slots=True)
class Backlog:
    """The unfinished work of a replica, including this client's newest requests."""

    tokens_left: int = 0  # prompt tokens still to be computed
    num_rows: int = 0  # running and waiting choices
    free_tokens: int | None = None  # free capacity of the KV cache; None: unknown


def cost(backlog: Backlog, num_prompt: int, num_cached: int) -> float:
    """Returns the cost of one more request, if the replica has ``num_cached`` of its prompt tokens cached."""
    computed = backlog.tokens_left + num_prompt - num_cached
    rows = ROW_TOKENS * backlog.num_rows * (1 + backlog.num_rows / CROWD)
    short = 0 if backlog.free_tokens is None else max(0, computed - backlog.free_tokens)
    return computed + rows + SHORTAGE * short


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
