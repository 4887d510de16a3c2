"""Slots: limits the number and the total size of lines in flight, over all batches of a process."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

MAX_LINES_BYTES = 256 * 2**20  # maximum total size of the lines in flight


class Slots:
    """Waiters get free slots in FIFO order, so batches alternate.

    ``most`` is called each time, since an engine's size is known only once it is ready. A line larger than
    ``max_bytes`` is sent when no other line is in flight.
    """

    def __init__(self, most: Callable[[], int], max_bytes: int) -> None:
        self._most, self._max_bytes = most, max_bytes
        self._num = self._num_bytes = 0
        self._ended = False
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_taken(self) -> int:
        return self._num

    async def take(self, num_bytes: int) -> None:
        if not self._waiting and self._fits(num_bytes):
            self._add(num_bytes)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.free(num_bytes)
            else:
                with contextlib.suppress(ValueError):  # ``look`` has removed it
                    self._waiting.remove((num_bytes, granted))
                self.look()
            raise

    def free(self, num_bytes: int) -> None:
        self._num -= 1
        self._num_bytes -= num_bytes
        self.look()

    def look(self) -> None:
        """Gives free slots to waiters. Must also be called when the result of ``most`` has changed."""
        while self._waiting and self._fits(self._waiting[0][0]):
            num_bytes, granted = self._waiting.popleft()
            if granted.done():
                continue
            self._add(num_bytes)
            granted.set_result(None)

    def end(self) -> None:
        """Gives a slot to every waiter. Batches must be stopped before, so that they send no more lines."""
        self._ended = True
        self.look()

    def _fits(self, num_bytes: int) -> bool:
        if self._ended:
            return True
        if not self._num:
            return self._most() > 0
        return self._num < self._most() and self._num_bytes + num_bytes <= self._max_bytes

    def _add(self, num_bytes: int) -> None:
        self._num += 1
        self._num_bytes += num_bytes
