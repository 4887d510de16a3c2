"""merged: several async generators read as one, in the order in which they have something to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

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
