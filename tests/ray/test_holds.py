"""Calls that run as long as a front's requests do (needs no Ray)."""

from __future__ import annotations

import asyncio

from chorale.client.wire.curve import new_keys
from chorale.serve.fleet.holds import EARLY, Ended, HoldDesk, HoldEnds
from tests.support import PATIENCE
from tests.support.serve.harness import run, until


def test_a_call_ends_when_the_front_says_so_also_before_it_begins() -> None:
    async def scene() -> None:
        public, secret = new_keys()
        desk, ends = HoldDesk("127.0.0.1", secret), HoldEnds()
        desk.start()
        ends.start()
        ends.connect("r0", desk.endpoint, public)
        calls = [asyncio.ensure_future(desk.hold(ends.front, name)) for name in ("a", "b", "c")]
        stranger = asyncio.ensure_future(desk.hold("another front", "a"))
        await asyncio.sleep(0)
        ends.ended("r0", "a")
        ends.ended("r0", "b")
        ends.ended("r0", "late")
        await asyncio.wait_for(asyncio.gather(*calls[:2]), PATIENCE)
        assert [call.done() for call in (*calls, stranger)] == [True, True, False, False]
        await until(lambda: desk._early, "the end that came early")
        await asyncio.wait_for(desk.hold(ends.front, "late"), PATIENCE)
        assert desk.num_held == 2
        for call in (calls[2], stranger):
            call.cancel()
        await asyncio.gather(calls[2], stranger, return_exceptions=True)
        assert desk.num_held == 0
        ends.close()
        desk.close()

    run(scene())


def test_the_calls_of_a_front_that_is_silent_end_and_others_stay() -> None:
    async def scene() -> None:
        now = [100.0]
        desk = HoldDesk("127.0.0.1", new_keys()[1], 2.0, clock=lambda: now[0])
        gone = asyncio.ensure_future(desk.hold("gone", "a"))
        alive = asyncio.ensure_future(desk.hold("alive", "a"))
        await asyncio.sleep(0)
        desk.receive(Ended("gone", ["x"]))  # never begins
        now[0] += 600  # this replica stood still
        desk.tick()
        await asyncio.sleep(0)
        assert not gone.done()
        for _ in range(8):
            now[0] += 0.5
            desk.receive(Ended("alive"))
            desk.tick()
        await asyncio.wait_for(gone, PATIENCE)
        assert not alive.done()
        now[0] += EARLY
        desk.receive(Ended("alive"))
        desk.tick()
        assert not desk._early
        alive.cancel()
        desk._socket.close()
        desk._context.term()

    run(scene())


def test_without_the_key_no_call_is_ended() -> None:
    async def scene() -> None:
        _, secret = new_keys()
        desk, ends = HoldDesk("127.0.0.1", secret), HoldEnds()
        desk.start()
        ends.start()
        ends.connect("r0", desk.endpoint, new_keys()[0])
        call = asyncio.ensure_future(desk.hold(ends.front, "a"))
        await asyncio.sleep(0)
        ends.ended("r0", "a")
        await asyncio.sleep(0.3)
        assert not call.done()
        call.cancel()
        ends.close()
        desk.close()

    run(scene())


def test_an_end_can_be_said_to_every_engine() -> None:
    async def scene() -> None:
        public, secret = new_keys()
        desks, ends = [HoldDesk("127.0.0.1", secret) for _ in range(2)], HoldEnds()
        ends.start()
        for place, desk in enumerate(desks):
            desk.start()
            ends.connect(f"r{place}", desk.endpoint, public)
        call = asyncio.ensure_future(desks[1].hold(ends.front, "a"))
        await asyncio.sleep(0)
        ends.ended_anywhere("a")
        await asyncio.wait_for(call, PATIENCE)
        ends.keep({"r1"})
        assert list(ends._sockets) == ["r1"]
        ends.close()
        for desk in desks:
            desk.close()

    run(scene())
