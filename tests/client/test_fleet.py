"""FleetClient with engines behind TCP that die, leave and join (real scheduler, fake device)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq

from chorale.client.base import EngineStatus
from chorale.client.continuation import continued, without_repeated
from chorale.client.fleet.fleet import FleetClient
from chorale.client.fleet.members import Ticket
from chorale.client.wire import curve
from chorale.client.wire.messages import EngineAddress
from chorale.config.seeds import SEED_BITS, choice_seed
from chorale.engine.types import GenerateRequest, SamplingSpec, TokenChunk
from chorale.errors import EngineDeadError, EngineLoadingError, QueueFullError
from chorale.serve.fleet.engine_host import EngineHost
from tests.support.serve.fake_engine import Behaviour
from tests.support.serve.harness import FAKE_ENGINE, expected, request, started, until

SLOW = Behaviour(step_seconds=0.01)


class LocalAssigner:
    """Assigns a request to the member that the fleet ranks first; counts the requests of each member."""

    def __init__(self, fleet: FleetClient) -> None:
        self.fleet = fleet
        self.names: list[str] = []
        self.given: list[tuple[str, str]] = []  # (request, member)
        self.running: dict[str, str] = {}
        self.holds = False  # True: nothing is assigned

    async def assign(self, ticket: Ticket) -> str:
        while self.holds or not (ranked := self.fleet.members.rank(ticket, self.names)):
            await asyncio.sleep(0.005)
        assert ticket.name not in self.running
        self.running[ticket.name] = ranked[0]
        self.given.append((ticket.name, ranked[0]))
        return ranked[0]

    def ended(self, ticket: Ticket) -> None:
        del self.running[ticket.name]


class FleetRig:
    def __init__(self, behaviour: Behaviour, **client: Any) -> None:
        self._behaviour = behaviour
        self.hosts: dict[str, EngineHost] = {}
        self.left: set[str] = set()
        self.client = FleetClient(LocalAssigner, **client)
        assert isinstance(self.client.assigner, LocalAssigner)
        self.assigner = self.client.assigner

    def add(self, *names: str) -> None:
        for name in names:
            host = EngineHost(
                self._behaviour.encode(), "127.0.0.1", prefix_secret=b"fleet", command=FAKE_ENGINE
            )
            host.start()
            self.hosts[name] = host
        self.announce()

    def announce(self, *without: str) -> None:
        """``without``: engines that leave for good."""
        self.left.update(without)
        names = [name for name in self.hosts if name not in self.left]
        self.assigner.names = names
        self.client.set_members({name: self.hosts[name].address for name in names})

    def kill(self, name: str) -> None:
        os.kill(self.hosts[name].monitor.pid, signal.SIGKILL)

    async def ready(self) -> None:
        members = self.client.members.by_name
        await until(lambda: all(m.is_followed for m in members.values()), "every engine is followed")


@contextlib.asynccontextmanager
async def fleet_rig(
    count: int = 2, behaviour: Behaviour | None = None, **client: Any
) -> AsyncIterator[FleetRig]:
    """Engines behind TCP (fake device, everything else real), and one fleet client for all of them."""
    rig = FleetRig(behaviour or Behaviour(step_seconds=0.005), **client)
    try:
        async with started(rig.client):
            rig.add(*(f"r{index}" for index in range(count)))
            await rig.ready()
            yield rig
    finally:
        await asyncio.gather(*(asyncio.to_thread(host.stop) for host in rig.hosts.values()))


async def read(rig: FleetRig, asked: GenerateRequest) -> dict[int, list[TokenChunk]]:
    found: dict[int, list[TokenChunk]] = {index: [] for index in range(asked.sampling.n)}
    async for chunks in rig.client.submit(asked):
        for chunk in chunks:
            assert chunk.error is None
            found[chunk.index].append(chunk)
    return found


def tokens(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def lose_engines(rig: FleetRig, asked: GenerateRequest, times: int = 1) -> dict[int, list[TokenChunk]]:
    """Kill the engine that serves the request ``times`` times, each time after some tokens."""
    reading = asyncio.ensure_future(read(rig, asked))
    for moved in range(times):
        await until(lambda moved=moved: len(rig.assigner.given) > moved, "assigned")
        await asyncio.sleep(0.15)
        for name in set(rig.assigner.running.values()):
            rig.kill(name)
        await until(lambda moved=moved: len(rig.assigner.given) > moved + 1 or reading.done(), "moved")
    return await reading


SEED = random.Random(5).getrandbits(SEED_BITS)


@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 0.5}, {"seed": None}], ids=str)
async def test_a_stream_whose_engine_is_killed_continues_on_another_with_the_same_tokens(
    sampling: dict[str, Any],
) -> None:
    """With a penalty it is computed again, and each token is delivered once; the fleet draws a seed if there
    is none."""
    async with fleet_rig(2, SLOW, seeds=random.Random(5)) as rig:
        plain = request("a", 60, seed=SEED)
        asked = msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, **sampling))
        found = await lose_engines(rig, asked)
        assert tokens(found[0]) == expected(plain)  # the fake model knows no penalties
        assert [chunk.finish_reason for chunk in found[0]][-1] == "length"
        (_, first), (name, second) = rig.assigner.given
        assert first != second
        assert name == "a+1.0"
        assert rig.client.num_in_flight == 0
        assert not rig.assigner.running
        assert {chunk.request_id for chunk in found[0]} == {"a"}


async def test_after_a_move_open_choices_continue_and_dropped_ones_do_not_run_again() -> None:
    async with fleet_rig(2, SLOW) as rig:
        asked = request("a", 60, n=3)
        stream = rig.client.submit(asked)
        found: dict[int, list[TokenChunk]] = {0: [], 1: [], 2: []}
        killed = False
        async for chunks in stream:
            for chunk in chunks:
                found[chunk.index].append(chunk)
            if not killed and len(tokens(found[2])) > 5:
                stream.drop(1)
                rig.kill(rig.assigner.given[0][1])
                killed = True
        assert [tokens(found[index]) for index in (0, 2)] == [expected(asked, 0), expected(asked, 2)]
        assert sorted(name for name, _ in rig.assigner.given) == ["a", "a+1.0", "a+1.2"]
        assert rig.client.num_in_flight == 0
        assert not rig.assigner.running


async def test_a_request_that_loses_too_many_engines_ends_with_an_error() -> None:
    """The request itself may be what kills them."""
    async with fleet_rig(4, SLOW, most_moves=2) as rig:
        with pytest.raises(EngineDeadError):
            await lose_engines(rig, request("a", 2000), times=3)
        assert len(rig.assigner.given) == 3
        assert rig.client.num_in_flight == 0
        assert not rig.assigner.running


async def test_an_engine_that_leaves_finishes_what_it_runs_and_gets_nothing_new() -> None:
    async with fleet_rig(2, SLOW) as rig:
        asked = request("a", 60)
        reading = asyncio.ensure_future(read(rig, asked))
        await until(lambda: rig.assigner.given, "assigned")
        (_, name), *_ = rig.assigner.given
        rig.announce(name)
        others = await asyncio.gather(*(read(rig, request(f"b{i}", 5)) for i in range(6)))
        assert all(tokens(each[0]) == expected(request("b", 5)) for each in others)
        assert {member for who, member in rig.assigner.given if who != "a"} == set(rig.hosts) - {name}
        assert tokens((await reading)[0]) == expected(asked)
        assert len(rig.assigner.given) == 7  # "a" was not moved
        await until(lambda: not rig.client.members.leaving, "its connection is closed")
        (free,) = (slot for slot in rig.client.engines if slot.is_free)
        assert free.status == EngineStatus("failed", message="the engine has left")
        rig.add("new")
        await rig.ready()
        assert len(rig.client.engines) == 2
        assert not free.is_free


async def test_requests_closed_or_aborted_before_or_after_assignment_no_longer_count() -> None:
    async with fleet_rig(1, SLOW) as rig:
        rig.assigner.holds = True
        waiting = [rig.client.submit(request(f"w{i}", 500, n=2)) for i in range(3)]
        await asyncio.sleep(0.02)
        waiting[0].drop(0)
        waiting[0].drop(1)
        await waiting[1].aclose()
        waiting[2].drop(0)
        assert rig.client.num_in_flight == 2
        rig.assigner.holds = False
        await until(lambda: "w2" in rig.assigner.running, "assigned")
        await asyncio.sleep(0.05)
        assert rig.client.num_in_flight == 1
        rig.client.abort("w2")
        chunks = [chunk async for part in waiting[2] for chunk in part]
        assert chunks[-1].finish_reason == "abort"
        assert chunks[-1].index == 1
        assert rig.client.num_in_flight == 0
        assert not rig.assigner.running
        assert not rig.client._requests
        await until(lambda: rig.client.stats.num_running == 0, "the engine stopped it")


async def test_requests_wait_while_the_only_engine_is_replaced() -> None:
    async with fleet_rig(1, gone_patience=60) as rig:
        rig.announce("r0")  # it leaves
        asked = request("a", 5)
        reading = asyncio.ensure_future(read(rig, asked))
        await asyncio.sleep(0)
        assert (rig.client.members.up, rig.client.num_in_flight) == ([], 1)
        rig.add("r1")
        assert tokens((await reading)[0]) == expected(asked)


async def test_requests_are_refused_without_an_engine_and_when_the_queue_is_full() -> None:
    async with fleet_rig(0, patience=0.2) as rig:
        with pytest.raises(EngineLoadingError):
            rig.client.submit(request("a"))
        rig.add("r0")
        await rig.ready()
        rig.assigner.holds = True
        stream = rig.client.submit(request("b"))
        with pytest.raises(EngineDeadError, match="no engine took the request"):
            await stream.__anext__()
        assert rig.client.num_in_flight == 0
        most: Any = rig.client._admission.capacity
        kept = [rig.client.submit(request(f"{'c' * i}b")) for i in range(most)]  # "b" is free again
        with pytest.raises(QueueFullError):
            rig.client.submit(request("d"))
        for each in kept:
            await each.aclose()


async def test_a_client_without_the_engines_key_can_neither_read_nor_connect() -> None:
    async with fleet_rig(1) as rig:
        address = rig.hosts["r0"].address
        other, _ = curve.new_keys()
        assert await hears(address.beats, address.public_key)
        assert not await hears(address.beats, "")
        assert not await hears(address.beats, other)
        rig.client.set_members({"stranger": EngineAddress(address.engine, address.beats, other)})
        await asyncio.sleep(0.5)
        assert rig.client.status.state in ("loading", "dead")
        assert not rig.client.members.by_name["stranger"].remote.is_known


async def hears(beats: str, key: str) -> bool:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        curve.enter(socket, key)
        socket.subscribe(b"")
        socket.connect(beats)
        return bool(await asyncio.to_thread(socket.poll, 700))


def test_a_continuation_requests_only_the_tokens_that_are_left() -> None:
    sampling = SamplingSpec(
        n=2, seed=2**63 - 1, max_tokens=10, min_tokens=4, grammar="g", grammar_context=3, prompt_logprobs=1
    )
    asked = GenerateRequest(request_id="a", prompt_token_ids=[1, 2, 3], sampling=sampling, cache_salt="s")
    rest: Any = continued(asked, 1, [8, 9], "a+1", began=True)
    assert rest.again == ()
    assert rest.request == GenerateRequest(
        request_id="a+1",
        prompt_token_ids=[1, 2, 3, 8, 9],
        cache_salt="s",
        sampling=SamplingSpec(
            seed=choice_seed(2**63 - 1, 1), max_tokens=8, min_tokens=2, grammar="g", grammar_context=5
        ),
    )
    assert continued(asked, 0, [1] * 10, "x", began=True) is None
    for counted in ({"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"bad_words": ((1,),)}):
        again = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(sampling, **counted))
        found: Any = continued(again, 1, [8, 9], "x", began=True)
        assert (found.again, found.request.prompt_token_ids) == ((8, 9), [1, 2, 3])
    whole: Any = continued(asked, 0, [], "x", began=False)
    assert whole.request.sampling.prompt_logprobs == 1


def test_repeated_tokens_must_be_the_delivered_ones() -> None:
    chunk = TokenChunk("a", 0, [1, 2, 3])
    assert without_repeated(chunk, [1, 2]) == (TokenChunk("a", 0, [3]), [])
    assert without_repeated(chunk, [1, 2, 3, 4]) == (TokenChunk("a", 0, []), [4])
    assert without_repeated(chunk, [1, 9]) is None
    assert without_repeated(TokenChunk("a", 0, [1], finish_reason="stop"), [1, 2]) is None
