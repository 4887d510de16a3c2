"""merged: several async generators read as one, in the order in which they have something to say."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


async def merged(sources: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[tuple[int, Item]]:
    """(index of the source, its item). The first exception of any ends all; closing it closes all.

    One source is read directly; several get a task each, which waits while its last item is unread.
    """
    if len(sources) == 1:
        try:
            async for item in sources[0]:
                yield 0, item
        finally:
            await sources[0].aclose()
        return
    queue: asyncio.Queue[tuple[int, Item] | None] = asyncio.Queue(len(sources))
    tasks = [asyncio.create_task(_read(index, source, queue)) for index, source in enumerate(sources)]
    num_open = len(tasks)
    try:
        while num_open:
            pair = await queue.get()
            if pair is not None:
                yield pair
                continue
            num_open -= 1
            for task in tasks:
                if task.done():
                    task.result()  # raises what it raised
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(
    index: int, source: AsyncGenerator[Item], queue: asyncio.Queue[tuple[int, Item] | None]
) -> None:
    """Ends with None in the queue, unless cancelled: then nobody reads it any more."""
    try:
        async for item in source:
            await queue.put((index, item))
    except Exception:
        await queue.put(None)
        raise
    finally:
        await source.aclose()
    await queue.put(None)


class Sources(Generic[Item]):
    """Async generators read as one, to which more may be added while they are read.

    A source that is alone is read directly; several get a task each. The first exception ends all.
    """

    def __init__(self) -> None:
        self._waiting: deque[AsyncGenerator[Item]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue: asyncio.Queue[Item | None] = asyncio.Queue()

    def __bool__(self) -> bool:
        return bool(self._waiting or self._tasks)

    def add(self, source: AsyncGenerator[Item]) -> None:
        self._waiting.append(source)

    async def read(self) -> AsyncGenerator[Item]:
        """Until every source has ended. Closing it closes them all."""
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
                said = await self._queue.get()
                if said is not None:
                    yield said
                else:
                    self._reap()
                self._queue.task_done()
        finally:
            await self._close()

    def unread(self) -> list[Item]:
        """After an error: what the sources had said by then, and nobody has read."""
        items = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        return [item for item in items if item is not None]

    async def _feed(self, source: AsyncGenerator[Item]) -> None:
        """Says an item first and waits for its reader then, so that none is lost. None: the end."""
        try:
            async for item in source:
                self._queue.put_nowait(item)
                await self._queue.join()
        finally:
            await source.aclose()
            self._queue.put_nowait(None)

    def _reap(self) -> None:
        """Let go of the tasks that have ended; raises what one of them raised.

        Of two that end together the first None finds both, and the second finds nobody. It must not wait
        then: those that are left may be waiting for their items to be read.
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
