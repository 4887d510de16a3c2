"""Slots: bounds on lines and bytes, FIFO order, and cancelled waiters."""

from __future__ import annotations

import asyncio

from chorale.jobs.slots import Slots


async def test_waiters_get_slots_in_fifo_order_within_both_bounds() -> None:
    slots, order = Slots(lambda: 2, 100), []

    async def take(name: str, num_bytes: int) -> None:
        await slots.take(num_bytes)
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for name, num_bytes in (("a", 60), ("b", 60), ("c", 10), ("d", 500)):
            group.create_task(take(name, num_bytes))
        await asyncio.sleep(0)
        assert order == ["a"]  # b is too large to be sent with a, and c waits behind b
        slots.free(60)
        await asyncio.sleep(0)
        assert order == ["a", "b", "c"]
        slots.free(60)
        await asyncio.sleep(0)
        assert order == ["a", "b", "c"]
        slots.free(10)  # alone, a line of any size is sent
    assert order == ["a", "b", "c", "d"]
    slots.free(500)
    assert slots.num_taken == 0


async def test_a_cancelled_waiter_takes_no_slot() -> None:
    slots = Slots(lambda: 1, 100)
    await slots.take(1)
    waiting = [asyncio.create_task(slots.take(1)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    slots.free(1)  # skips waiting[0], which is already cancelled
    waiting[1].cancel()  # it has a slot, and returns it
    await asyncio.gather(*waiting, return_exceptions=True)
    assert slots.num_taken == 1
    slots.free(1)
    assert slots.num_taken == 0


async def test_nothing_is_sent_until_the_engine_can_take_it() -> None:
    most = [0]
    slots = Slots(lambda: most[0], 100)
    waiting = asyncio.create_task(slots.take(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    most[0] = 1
    slots.look()
    await waiting


async def test_every_waiter_gets_a_slot_at_the_end() -> None:
    slots = Slots(lambda: 1, 100)
    await slots.take(60)
    waiting = [asyncio.create_task(slots.take(60)) for _ in range(2)]
    await asyncio.sleep(0)
    slots.end()
    await asyncio.sleep(0)
    assert [each.done() for each in waiting] == [True, True]
    assert slots.num_taken == 3
