"""Slots: how many lines are sent at once, over all batches of a process, and how large they are together."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

MAX_LINES_BYTES = 256 * 2**20  # of lines that a process is sending


class Slots:
    """Free slots go to those who wait, in the order in which they came: batches take turns.

    ``most`` is asked each time, since an engine's size is known only once it is ready. A line that alone is
    larger than ``max_bytes`` is sent when no other is.
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
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.free(num_bytes)
            else:
                with contextlib.suppress(ValueError):  # ``look`` has met it
                    self._waiting.remove((num_bytes, turn))
                self.look()
            raise

    def free(self, num_bytes: int) -> None:
        self._num -= 1
        self._num_bytes -= num_bytes
        self.look()

    def look(self) -> None:
        """Gives slots to those who wait, as far as there are any; called also when ``most`` has changed."""
        while self._waiting and self._fits(self._waiting[0][0]):
            num_bytes, turn = self._waiting.popleft()
            if turn.done():
                continue
            self._add(num_bytes)
            turn.set_result(None)

    def end(self) -> None:
        """Lets all who wait go on: they are to send no more lines."""
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
