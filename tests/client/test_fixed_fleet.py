"""FixedFleet with several engines in separate processes (real scheduler, fake device).

``test_fleet`` tests the behaviour of every fleet: moves, closing early, repeated tokens.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from chorale.client.fleet.fixed_members import FixedFleet
from chorale.client.fleet.members import SLICE
from chorale.client.wire.messages import ClientExpired
from chorale.config.engine import ServerConfig
from chorale.engine.types import GenerateRequest, SamplingSpec
from chorale.errors import ConflictError, EngineDeadError, EngineLoadingError, QueueFullError, RequestError
from tests.support.serve.fake_engine import Behaviour
from tests.support.serve.harness import (
    ReplicaRig,
    collect,
    expected,
    replica_rig,
    request,
    run,
    started,
    until,
)

LONG = list(range(1, 16 * SLICE * 3))  # several slices of hashing


async def talk(rig: ReplicaRig, name: str, rounds: int, opening: list[int]) -> list[tuple[int, int, int]]:
    """Hold a conversation. Returns (engine, reported cached tokens, expected cached tokens) per round."""
    found, prompt = [], opening
    for number in range(rounds):
        asked = request(f"{name}-{number}", 24, prompt=prompt, seed=number)
        sent: list[GenerateRequest] = []
        for member in rig.members:  # records the requests that the fleet sends
            member.remote.take = recorded(member.remote.take, sent)  # type: ignore[method-assign]
        engine, cached, tokens = await rig.ask(asked)
        assert tokens == expected(asked)
        (estimate,) = {each.num_expected_cached for each in sent if each.request_id == asked.request_id}
        found.append((engine, cached, estimate))
        prompt = prompt + tokens + [number + 1] * 30
    return found


def recorded(take: Any, sent: list[GenerateRequest]) -> Any:
    def wrapper(asked: GenerateRequest, stream: Any, follower: Any) -> None:
        sent.append(asked)
        take(asked, stream, follower)

    return wrapper


async def test_a_conversation_stays_on_its_engine_and_its_hits_are_as_expected() -> None:
    async with replica_rig(3, own_secrets=True) as rig:
        openings = [[10 + i] * random.Random(i).randint(40, 300) for i in range(6)]
        for name, opening in enumerate(openings):
            found = await talk(rig, f"c{name}", 5, opening)
            assert len({engine for engine, _, _ in found}) == 1, found
            assert all(cached == estimate for _, cached, estimate in found), found
            assert all(cached > 0 for _, cached, _ in found[1:]), found


async def test_concurrent_conversations_have_as_many_cache_hits_as_on_one_engine() -> None:
    """Each asks its next question while the others are being answered."""

    async def hits(count: int) -> tuple[int, set[int]]:
        async with replica_rig(count, Behaviour(step_seconds=0.002, num_blocks=32768)) as rig:
            openings = [[10 + i] * (2000 + 16 * i) for i in range(8)]
            found = await asyncio.gather(*(talk(rig, f"c{i}", 3, each) for i, each in enumerate(openings)))
            await rig.idle()
            stats = rig.client.stats
            assert stats.prefix_cache_hits == sum(cached for rounds in found for _, cached, _ in rounds)
            for rounds in found:
                assert len({engine for engine, _, _ in rounds}) == 1
            return stats.prefix_cache_hits, {rounds[0][0] for rounds in found}

    one, two = await hits(1), await hits(2)
    assert one[0] == two[0] > 0
    assert (one[1], two[1]) == ({0}, {0, 1})


def test_a_long_prompt_is_hashed_in_slices_and_its_cached_blocks_are_found() -> None:
    async def scene() -> None:
        async with replica_rig(2) as rig:
            first = await rig.ask(request("a", 3, prompt=LONG))
            asked = request("b", 3, prompt=[*LONG, 5])
            stream = rig.client.submit(asked)
            await asyncio.sleep(0)
            assert not any(member.remote.num_in_flight for member in rig.members)  # still being hashed
            assert rig.client.num_in_flight == 1
            chunks = [chunk async for part in stream for chunk in part]
            assert stream.engine == first[0]
            assert chunks[0].num_cached_tokens == len(LONG) // 16 * 16
            assert rig.client.num_in_flight == 0

    run(scene(), "uvloop")


async def test_a_burst_is_spread_before_any_engine_has_answered() -> None:
    async with replica_rig(3, Behaviour(step_seconds=0.005)) as rig:
        streams = [rig.client.submit(request(f"r{i}", 30, prompt=[i + 1] * 100)) for i in range(30)]
        await asyncio.sleep(0)
        engines = [stream.engine for stream in streams]
        assert [engines.count(index) for index in range(3)] == [10, 10, 10]
        await asyncio.gather(*(collect(stream) for stream in streams))
        await rig.idle()
        assert not any(member.follower._unseen for member in rig.members)
        # Long and short prompts alternate: no engine may get more than its share of the long ones.
        sizes = [4000, 20] * 6
        mixed = [request(f"m{i}", 3, prompt=[60 + i] * size) for i, size in enumerate(sizes)]
        streams = [rig.client.submit(each) for each in mixed]
        await asyncio.sleep(0)
        tokens = [0, 0, 0]
        for stream, size in zip(streams, sizes, strict=True):
            tokens[stream.engine] += size
        assert max(tokens) < 9000, tokens
        await asyncio.gather(*(collect(stream) for stream in streams))


async def test_requests_for_a_hot_prefix_use_every_engine() -> None:
    async with replica_rig(2, Behaviour(step_seconds=0.005)) as rig:
        hot = [7] * 1600
        await rig.ask(request("warm", 3, prompt=[*hot, 1]))
        streams = [rig.client.submit(request(f"r{i}", 200, prompt=[*hot, i + 2])) for i in range(40)]
        await asyncio.sleep(0)
        engines = [stream.engine for stream in streams]
        assert min(engines.count(0), engines.count(1)) >= 8, engines
        await asyncio.gather(*(collect(stream) for stream in streams))


async def test_requests_and_prefixes_of_another_process_count_in_the_choice_of_an_engine() -> None:
    async with replica_rig(2, Behaviour(step_seconds=0.01)) as rig:
        directories = [each.directory for each in rig.engines]
        async with started(FixedFleet(directories, first_slot=1)) as other:
            followers = [member.follower for member in other.members.by_name.values()]
            await until(lambda: all(follower.index for follower in followers), "it follows both engines")
            busy = rig.members[0].remote
            streams = [busy.submit(request(f"r{i}", 50_000)) for i in range(6)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            await until(lambda: followers[0].backlog().num_rows == 6, "the other process knows")
            assert followers[1].backlog().num_rows == 0
            theirs = [other.submit(request(f"o{i}", 3, prompt=[50 + i] * 40)) for i in range(3)]
            await asyncio.gather(*(collect(stream) for stream in theirs))
            assert {stream.engine for stream in theirs} == {1}
            assert len([s for s in streams if s.num_unfinished]) == 6
            await asyncio.gather(*(stream.aclose() for stream in streams))
            await rig.idle()

            engine, _, _ = await rig.ask(request("a", 3, prompt=[3] * 500))
            await rig.idle()
            await until(
                lambda: len(followers[engine].index.full) > len(followers[1 - engine].index.full),  # type: ignore[union-attr]
                "the other process knows the blocks",
            )
            await until(lambda: not any(f.backlog().num_rows for f in followers), "it knows the end")
            stream = other.submit(request("b", 3, prompt=[3] * 500))
            chunks = [chunk async for part in stream for chunk in part]
            assert (stream.engine, chunks[0].num_cached_tokens) == (engine, 496)


async def test_the_index_of_a_restarted_engine_is_empty() -> None:
    async with replica_rig(2) as rig:
        engine, _, _ = await rig.ask(request("a", 3, prompt=[3] * 500))
        follower = rig.members[engine].follower
        assert follower.index.full
        rig.engines[engine].kill()
        await until(lambda: follower.index is None, "the index is dropped")
        await rig.ready()
        assert not follower.index.full
        found = await talk(rig, "c", 3, [4] * 100)
        assert all(cached == estimate for _, cached, estimate in found)


async def test_without_any_engine_new_requests_are_refused_and_those_in_flight_wait() -> None:
    async with replica_rig(2, Behaviour(step_seconds=0.005)) as rig:
        client = rig.client
        asked = [request(f"r{i}", 100, prompt=[i + 1] * 40) for i in range(4)]
        reads = [asyncio.ensure_future(collect(client.submit(each))) for each in asked]
        await until(lambda: client.stats.generation_tokens > 40, "all run")
        for index in range(2):
            rig.engines[index].kill()
        await until(lambda: client.status.state in ("dead", "loading"), "no engine is up")
        with pytest.raises((EngineDeadError, EngineLoadingError)) as refused:
            client.submit(request("none"))
        assert refused.value.retry_after
        with pytest.raises((EngineDeadError, EngineLoadingError)):
            client.reserve({"none": 1})
        for each, read in zip(asked, reads, strict=True):
            assert (await read)[0] == (expected(each), "length")
        assert client.num_in_flight == 0


async def test_the_queue_limit_counts_all_engines_and_reservations_admit_all_or_none() -> None:
    behaviour = Behaviour(step_seconds=0.005, max_num_seqs=2)
    async with replica_rig(2, behaviour, queue=ServerConfig(max_queued_requests=2)) as rig:
        client = rig.client  # room for 2 + 2 + 2
        assert client.info.max_num_seqs == 2
        streams = [client.submit(request(f"r{i}", 50_000)) for i in range(4)]
        with pytest.raises(QueueFullError):
            client.reserve({"a": 1, "b": 2})
        client.reserve({"a": 1, "b": 1})
        with pytest.raises(QueueFullError):
            client.submit(request("c"))
        with pytest.raises(RequestError, match="at most 6"):
            client.submit(request("d", n=7))
        reserved = [client.submit(request(name, 3)) for name in ("a", "b")]
        client.release(["a", "b"])
        assert client.num_in_flight == 6
        await asyncio.gather(*(stream.aclose() for stream in streams))
        assert [len(answer[0][0]) for answer in await asyncio.gather(*map(collect, reserved))] == [3, 3]
        rig.engines[0].kill()
        await until(lambda: client.engines[0].status.state != "ready", "one engine is gone")
        rest = [client.submit(request(f"s{i}", 50_000)) for i in range(4)]
        with pytest.raises(QueueFullError):  # room for 2 + 2 without the engine
            client.submit(request("e"))
        with pytest.raises(QueueFullError):  # fits once the engine is back
            client.submit(request("f", n=6))
        await asyncio.gather(*(stream.aclose() for stream in rest))


async def test_a_refused_request_does_not_count_in_the_backlog() -> None:
    async with replica_rig(2) as rig:
        bad = GenerateRequest(
            request_id="bad", prompt_token_ids=[2**40] * 40, sampling=SamplingSpec(max_tokens=3)
        )
        chunks = [chunk async for part in rig.client.submit(bad) for chunk in part]
        assert [chunk.finish_reason for chunk in chunks] == ["error"]
        await rig.idle()
        first = rig.client.submit(request("same", 3))
        with pytest.raises(ConflictError):
            rig.client.submit(request("same", 3))
        await collect(first)


async def test_a_client_that_expired_follows_the_engine_again() -> None:
    async with replica_rig(2) as rig:
        member = rig.members[0]
        follower = member.follower
        await rig.ask(request("a", 3, prompt=[3] * 100))
        expired = ClientExpired(member.remote.info.engine_id, "the server process was silent")
        member.remote._message(expired)
        assert follower.index is None
        await until(lambda: follower.index is not None, "it has a new snapshot")
        found = await talk(rig, "c", 3, [4] * 100)
        assert all(cached == estimate for _, cached, estimate in found)


async def test_a_failed_engine_no_longer_counts_in_the_capacity() -> None:
    behaviour = Behaviour(step_seconds=0.005, max_num_seqs=2)
    async with replica_rig(2, behaviour, queue=ServerConfig(max_queued_requests=2)) as rig:
        client = rig.client
        stream = client.submit(request("r", 50_000))
        await anext(stream)
        lost = stream.engine
        rig.members[lost].remote.mark_failed("no such device")  # as its last heartbeat does
        await until(lambda: rig.members[1 - lost].remote.num_in_flight == 1, "the request moves")
        assert client.status.state == "ready"
        with pytest.raises(RequestError, match="at most 4"):  # 6 with both engines
            client.submit(request("s", n=5))
        asked = [request(f"t{i}", 3, prompt=[i + 1] * 40) for i in range(3)]
        assert {engine for engine, _, _ in [await rig.ask(each) for each in asked]} == {1 - lost}
        client.mark_failed("no device is left")
        with pytest.raises(EngineDeadError, match="no device is left"):
            await collect(stream)
        with pytest.raises(EngineDeadError, match="no device is left"):
            client.submit(request("u", 3))
