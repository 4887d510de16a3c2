"""Commands to engine processes (fake device): every client agrees, kills in between, long tasks."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from chorale.client.fleet.fixed_members import FixedFleet
from chorale.client.remote import RemoteClient
from chorale.engine.commands import Command, Outcome
from chorale.errors import ConflictError, EngineError, EnginePausedError
from chorale.serve.watch import WatchLimits
from tests.support.serve.fake_engine import Behaviour
from tests.support.serve.harness import (
    Rig,
    collect,
    expected,
    replica_rig,
    request,
    rig,
    started,
    until,
)

RUNS, PAUSED, ASLEEP = (Outcome(*state) for state in ((False, False), (True, False), (True, True)))
SLOW = Behaviour(step_seconds=0.01, task_seconds=0.0)


def tell(client: RemoteClient | FixedFleet, action: Any, **fields: Any) -> asyncio.Future[Outcome]:
    return asyncio.ensure_future(client.control(Command(action=action, **fields)))


async def replaced(r: Rig) -> None:
    """Kills the engine, and waits for its successor."""
    killed = r.kill()
    await until(lambda: r.monitor.pid not in (None, killed), "a new process")
    await until(lambda: r.client.status.state == "ready" and r.client.info.pid != killed, "it is ready")


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_other_pauses_refuse_new_requests_until_the_engine_resumes(mode: str) -> None:
    async with rig(SLOW) as r:
        first = request("first", 30)
        running = asyncio.ensure_future(collect(r.client.submit(first)))
        await until(lambda: r.client.stats.generation_tokens > 5, "it runs")
        paused = tell(r.client, "pause", mode=mode)
        await asyncio.sleep(0)
        with pytest.raises(EnginePausedError):
            await collect(r.client.submit(request("late")))
        assert await paused == PAUSED
        tokens, reason = (await running)[0]
        assert (reason, tokens == expected(first)) == (
            ("length", True) if mode == "wait" else ("abort", False)
        )
        await tell(r.client, "resume")
        assert await collect(r.client.submit(first)) == {0: (expected(first), "length")}


async def test_all_replicas_follow_and_every_client_sees_the_same() -> None:
    async with (
        replica_rig(2, SLOW) as r,
        started(FixedFleet([each.directory for each in r.engines])) as other,
    ):
        await until(lambda: len(other.members.up) == 2, "the other client is connected")
        for action, state in (("pause", PAUSED), ("resume", RUNS), ("sleep", ASLEEP), ("wake_up", RUNS)):
            assert await tell(r.client, action) == state
            assert await tell(other, "state") == state
            for member in r.members:
                assert await tell(member.remote, "state") == state


async def test_no_replica_is_told_while_one_is_missing() -> None:
    async with replica_rig(2, SLOW) as r:
        r.engines[0].kill()
        await until(lambda: r.members[0].remote.status.state != "ready", "the loss is noticed")
        with pytest.raises(EngineError) as caught:
            await tell(r.client, "pause")
        assert caught.value.status == 503
        assert await tell(r.members[1].remote, "state") == RUNS
        await r.ready()
        assert await tell(r.client, "pause") == PAUSED


@pytest.mark.parametrize("action", ["pause", "sleep"])
async def test_the_successor_of_a_killed_engine_is_in_the_same_state(action: str) -> None:
    async with rig(SLOW) as r:
        state = await tell(r.client, action, mode="keep")
        await replaced(r)
        assert await tell(r.client, "state") == state
        asked = request("later")
        answer = asyncio.ensure_future(collect(r.client.submit(asked)))
        await until(lambda: r.client.stats.num_waiting == 1, "it is held back")
        await tell(r.client, "resume" if action == "pause" else "wake_up")
        assert await answer == {0: (expected(asked), "length")}


async def test_a_refused_command_does_not_change_the_state_of_a_successor() -> None:
    async with rig(SLOW) as r:
        await tell(r.client, "sleep")
        with pytest.raises(ConflictError):
            await tell(r.client, "resume")
        await replaced(r)
        assert await tell(r.client, "state") == ASLEEP


UPDATE = ("pause", "start_weight_update", "update_weights", "finish_weight_update", "resume")


@pytest.mark.parametrize("way_out", [UPDATE, ("sleep", "wake_up")], ids=["update", "sleep at level 2"])
async def test_the_successor_of_an_updated_engine_refuses_requests(way_out: tuple[Any, ...]) -> None:
    """It has the weights of its start, which its clients do not expect."""
    async with rig(SLOW) as r:
        for action in UPDATE:
            outcome = await tell(r.client, action)
        assert outcome == Outcome(False, False, weight_version="1")
        await replaced(r)
        assert await tell(r.client, "resume") == RUNS
        with pytest.raises(EnginePausedError):
            await collect(r.client.submit(request("early")))
        for action in way_out:
            await tell(r.client, action, level=2)
        asked = request("later")
        assert await collect(r.client.submit(asked)) == {0: (expected(asked), "length")}


async def test_kills_during_commands_leave_a_state_from_which_every_command_works() -> None:
    draw, watch = random.Random(1), WatchLimits(max_deaths=100, backoff=0.01)
    async with rig(Behaviour(step_seconds=0.002, task_seconds=0.03), watch=watch) as r:
        for kill in range(3):
            action = ("sleep", "wake_up", "pause")[kill % 3]
            if action == "wake_up":
                await tell(r.client, "sleep")
            told = tell(r.client, action)
            await asyncio.sleep(draw.uniform(0, 0.05))
            await replaced(r)
            with contextlib.suppress(EngineError):
                await told
            state = await tell(r.client, "state")
            assert state in (RUNS, PAUSED if action == "pause" else ASLEEP)
            assert await tell(r.client, "wake_up") == RUNS
            asked = request(f"after-{kill}")
            assert await collect(r.client.submit(asked)) == {0: (expected(asked), "length")}
        assert r.monitor.num_restarts == 3


async def test_a_long_task_that_is_announced_does_not_look_like_a_hang() -> None:
    watch = WatchLimits(heartbeat_timeout=0.5, step_timeout=0.5)
    async with rig(Behaviour(task_seconds=1.5), watch=watch) as r:
        engine = r.pid
        assert await tell(r.client, "sleep") == ASLEEP
        assert await tell(r.client, "wake_up") == RUNS
        assert (r.pid, r.monitor.num_restarts) == (engine, 0)
