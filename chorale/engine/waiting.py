"""WaitingQueue: sequences that wait for a row, best key first. Removal is lazy, so an abort is O(1)."""

from __future__ import annotations

import heapq

from chorale.engine.sequence import Sequence, Status

Entry = tuple[tuple[int, int], Sequence]


def is_live(entry: Entry) -> bool:
    return entry[1].status is Status.WAITING


def tokens_left(sequence: Sequence) -> int:
    """Estimate of the tokens that a waiting sequence will compute: all but the prefix that is cached."""
    state = sequence.request
    if state.prompt_done:
        return 1 + len(sequence.output)
    return max(1, sequence.num_prompt - state.request.num_expected_cached) + len(sequence.output)


class WaitingQueue:
    """A heap of WAITING sequences. Sequences that ended while they waited are skipped at the top."""

    __slots__ = ("_heap", "_num_dead", "_num_live", "num_batch", "num_tokens")

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._num_live = 0
        self._num_dead = 0  # entries whose sequence has ended
        self.num_batch = 0  # of the live
        self.num_tokens = 0  # ``tokens_left`` of the live

    def __len__(self) -> int:
        return self._num_live

    def push(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        heapq.heappush(self._heap, (sequence.key, sequence))  # keys are unique among the live
        self._num_live += 1
        self.num_batch += sequence.is_batch
        self.num_tokens += tokens_left(sequence)

    def head(self) -> Sequence | None:
        while self._heap and not is_live(self._heap[0]):
            heapq.heappop(self._heap)
            self._num_dead -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Remove and return the sequence that ``head`` returned."""
        self._num_live -= 1
        sequence = heapq.heappop(self._heap)[1]
        self.num_batch -= sequence.is_batch
        self.num_tokens -= tokens_left(sequence)
        return sequence

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
            self._heap = [entry for entry in self._heap if is_live(entry) and entry[1] is not sequence]
            heapq.heapify(self._heap)
            self._num_dead = 0
