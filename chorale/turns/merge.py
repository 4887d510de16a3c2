"""Sources: reads several async generators as one, in the order in which they yield."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Sources(Generic[Item]):
    """Async generators read as one. More may be added while they are read.

    A single source is read directly; several have a task each. The first exception ends all.
    """

    def __init__(self) -> None:
        self._waiting: deque[AsyncGenerator[Item]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue: asyncio.Queue[Item | None] = asyncio.Queue()

    def add(self, source: AsyncGenerator[Item]) -> None:
        self._waiting.append(source)

    async def read(self) -> AsyncGenerator[Item]:
        """Reads until every source has ended. Closing it closes all sources."""
        try:
            while self._waiting or self._tasks:
                if len(self._waiting) == 1 and not self._tasks:
                    async for item in self._waiting[0]:
                        yield item
                        if len(self._waiting) > 1:
                            break  # there are several from here on
                    else:
                        self._waiting.popleft()
                    continue
                while self._waiting:
                    self._tasks.add(asyncio.create_task(self._feed(self._waiting.popleft())))
                item_or_end = await self._queue.get()
                if item_or_end is not None:
                    yield item_or_end
                else:
                    self._reap()
                self._queue.task_done()
        finally:
            await self._close()

    def unread(self) -> list[Item]:
        """Returns the unread items that the sources had yielded before an error."""
        items = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        return [item for item in items if item is not None]

    async def _feed(self, source: AsyncGenerator[Item]) -> None:
        """Queues each item before waiting for its reader, so that none is lost; None marks the end."""
        try:
            async for item in source:
                self._queue.put_nowait(item)
                await self._queue.join()
        finally:
            await source.aclose()
            self._queue.put_nowait(None)

    def _reap(self) -> None:
        """Forgets the tasks that have ended. Raises the exception of one that failed.

        If two end together, the first None finds both and the second finds neither. It must not wait then:
        the remaining tasks may be waiting for their items to be read.
        """
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for source in self._waiting:
            await source.aclose()
