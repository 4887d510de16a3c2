"""WaitingQueue: sequences without a row, best key first. Removal is lazy, so that an abort is O(1)."""

from __future__ import annotations

import heapq

from chorale.engine.sequence import Sequence, Status


class WaitingQueue:
    """A heap of WAITING sequences. One that ended while it waited is skipped when it surfaces."""

    __slots__ = ("_heap", "_num_live")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def push(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        heapq.heappush(self._heap, (sequence.key, sequence))  # keys are unique among the live
        self._num_live += 1

    def head(self) -> Sequence | None:
        while self._heap and self._heap[0][1].status is not Status.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Take out the sequence that ``head`` named."""
        self._num_live -= 1
        return heapq.heappop(self._heap)[1]

    def forget(self, sequence: Sequence) -> None:
        """The sequence is about to end; its entry stays in the heap until it surfaces."""
        self._num_live -= 1
        if self._num_live == 0:
            self._heap.clear()

    def live(self) -> list[Sequence]:
        return [sequence for _, sequence in self._heap if sequence.status is Status.WAITING]
