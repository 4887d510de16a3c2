"""Sources: generators read as one, joined by others while they are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from chorale.turns.merge import Sources


@pytest.mark.parametrize("counts", [(0, 0, 1), (0, 0, 5), (1, 1, 5), (1, 0, 2, 3)])
def test_sources_that_end_together_do_not_hold_up_the_others(counts: tuple[int, ...]) -> None:
    async def main(num_steps: int) -> None:
        async def source(number: int, count: int) -> AsyncGenerator[tuple[int, int]]:
            for item in range(count):
                for _ in range(num_steps):
                    await asyncio.sleep(0)
                yield number, item

        sources: Sources[tuple[int, int]] = Sources()
        for number, count in enumerate(counts):
            sources.add(source(number, count))
        found = [item async for item in sources.read()]
        assert sorted(found) == [(n, item) for n, count in enumerate(counts) for item in range(count)]

    for num_steps in range(4):  # who ends together with whom depends on how long each takes for an item
        asyncio.run(asyncio.wait_for(main(num_steps), 5))


@pytest.mark.parametrize("num_steps", range(8))
async def test_items_before_an_error_are_not_lost(num_steps: int) -> None:
    said: list[tuple[int, int]] = []

    async def source(number: int) -> AsyncGenerator[tuple[int, int]]:
        for item in range(20):
            await asyncio.sleep(0)
            said.append((number, item))
            yield number, item

    async def failing() -> AsyncGenerator[tuple[int, int]]:
        for _ in range(num_steps):
            await asyncio.sleep(0)
        raise ValueError("no")
        yield 0, 0

    sources: Sources[tuple[int, int]] = Sources()
    for added in (source(1), failing(), source(2), source(3)):
        sources.add(added)
    found: list[tuple[int, int]] = []

    async def read() -> None:
        async for item in sources.read():
            found.append(item)
            await asyncio.sleep(0)

    with pytest.raises(ValueError, match="no"):
        await read()
    assert [*found, *sources.unread()] == said


@pytest.mark.parametrize("num_others", [0, 1, 3])
async def test_an_error_ends_all_and_closing_closes_all(num_others: int) -> None:
    closed: list[int] = []

    async def endless(number: int) -> AsyncGenerator[int]:
        try:
            while True:
                await asyncio.sleep(0.001)
                yield number
        finally:
            await asyncio.sleep(0)
            closed.append(number)

    async def failing() -> AsyncGenerator[int]:
        yield -1
        await asyncio.sleep(0.01)
        raise ValueError("no")

    sources: Sources[int] = Sources()
    for number in range(num_others):
        sources.add(endless(number))
    sources.add(failing())
    with pytest.raises(ValueError, match="no"):
        async for _ in sources.read():
            pass
    assert sorted(closed) == list(range(num_others))

    sources, closed[:] = Sources(), []
    for number in range(num_others + 1):
        sources.add(endless(number))
    reading = sources.read()
    await anext(reading)
    await reading.aclose()
    assert sorted(closed) == list(range(num_others + 1))
