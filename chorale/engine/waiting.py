"""WaitingQueue: sequences that wait for a row. Owners take turns; within an owner, the best key is first.

Removal is lazy, so an abort is O(1).
"""

from __future__ import annotations

import heapq

from chorale.engine.accounts import Account
from chorale.engine.sequence import Sequence, Status

Entry = tuple[tuple[int, int], Sequence]


def is_live(entry: Entry) -> bool:
    return entry[1].status is Status.WAITING


def by_turn(sequence: Sequence) -> tuple[int, float, float, int]:
    """Sort by priority, then by the owner's computed tokens, then by its rows, then by arrival."""
    priority, arrival = sequence.key
    account = sequence.account
    return priority, account.served, account.claim, arrival


def tokens_left(sequence: Sequence) -> int:
    """Estimate the tokens that a waiting sequence will compute: all except the cached prefix."""
    state = sequence.request
    if state.prompt_done:
        return 1 + len(sequence.output)
    return max(1, sequence.num_prompt - state.request.num_expected_cached) + len(sequence.output)


class WaitingQueue:
    """A heap of WAITING sequences for each account. Those that ended while they waited are skipped at the
    top."""

    __slots__ = ("_heaps", "_num_dead", "_num_live", "num_batch", "num_tokens")

    def __init__(self) -> None:
        self._heaps: dict[Account, list[Entry]] = {}
        self._num_live = 0
        self._num_dead = 0  # entries whose sequence has ended
        self.num_batch = 0  # live entries of batch work
        self.num_tokens = 0  # sum of ``tokens_left`` over live entries

    def __len__(self) -> int:
        return self._num_live

    def push(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        heap = self._heaps.setdefault(sequence.account, [])
        heapq.heappush(heap, (sequence.key, sequence))  # keys of live entries are unique
        self._num_live += 1
        self.num_batch += sequence.is_batch
        self.num_tokens += tokens_left(sequence)

    def head(self) -> Sequence | None:
        heads = []
        for account, heap in list(self._heaps.items()):
            while heap and not is_live(heap[0]):
                heapq.heappop(heap)
                self._num_dead -= 1
            if heap:
                heads.append(heap[0][1])
            else:
                del self._heaps[account]
        return min(heads, key=by_turn) if len(heads) > 1 else next(iter(heads), None)

    def remove_head(self, sequence: Sequence) -> None:
        """Remove a sequence that ``head`` returned earlier; ``head`` may by now return another owner's."""
        self._num_live -= 1
        first = heapq.heappop(self._heaps[sequence.account])[1]
        assert first is sequence
        self.num_batch -= sequence.is_batch
        self.num_tokens -= tokens_left(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop a WAITING sequence that is about to end.

        Its entry stays in the heap until it reaches the top or such entries are the majority, so that clients
        that come and go do not fill the memory.
        """
        self._num_live -= 1
        self.num_batch -= sequence.is_batch
        self.num_tokens -= tokens_left(sequence)
        self._num_dead += 1
        if self._num_dead > self._num_live + 16:
            for account, heap in self._heaps.items():
                self._heaps[account] = [e for e in heap if is_live(e) and e[1] is not sequence]
                heapq.heapify(self._heaps[account])
            self._num_dead = 0
