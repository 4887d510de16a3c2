"""RemoteClient with an engine in a separate process (real scheduler, fake device)."""

from __future__ import annotations

import asyncio
import signal

import pytest

from chorale.client.remote import ClientLimits, RemoteClient
from chorale.config.engine import ServerConfig
from chorale.errors import (
    EngineDeadError,
    EngineLoadingError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
)
from chorale.serve.watch import WatchLimits
from tests.support.serve.fake_engine import LIMITS, Behaviour
from tests.support.serve.harness import collect, expected, request, rig, run, started, until

SOON = 20.0  # seconds: a tenth of the time that the requests would take, and enough on two busy cores


def test_tokens_of_concurrent_requests_arrive_in_order() -> None:
    async def scene() -> None:
        async with rig() as r:
            asked = [
                request(f"r{i}", 5 + i % 40, prompt=list(range(1 + i, 30 + i)), seed=i, n=1 + i % 3)
                for i in range(200)
            ]
            answers = await asyncio.gather(*(collect(r.client.submit(a)) for a in asked))
            for a, answer in zip(asked, answers, strict=True):
                assert answer == {i: (expected(a, i), "length") for i in range(a.sampling.n)}
            assert r.client.num_in_flight == 0
            await r.is_empty()

    run(scene(), "uvloop")


async def test_abort_ends_the_stream_and_frees_the_engine() -> None:
    async with rig(Behaviour(step_seconds=0.005)) as r:
        stream = r.client.submit(request("r", 50_000, n=2))
        await anext(stream)
        r.client.abort("r")
        r.client.abort("unknown")
        answer = await collect(stream)
        assert [reason for _, reason in answer.values()] == ["abort", "abort"]
        assert r.client.num_in_flight == 0
        assert await r.is_empty() < SOON
        # The id may be used again, and old chunks do not reach the new stream.
        again = request("r", 10)
        assert await collect(r.client.submit(again)) == {0: (expected(again), "length")}


async def test_a_dropped_choice_stops_in_the_engine_and_the_others_continue() -> None:
    async with rig(Behaviour(step_seconds=0.005)) as r:
        asked = request("r", 400, n=3)
        stream = r.client.submit(asked)
        await anext(stream)
        stream.drop(1)
        assert r.client.num_in_flight == 2
        await until(lambda: r.client.stats.num_running == 2, "the engine runs two choices")
        answer = await collect(stream)
        assert {i: answer[i][1] for i in (0, 2)} == {0: "length", 2: "length"}
        assert answer[0][0] == expected(asked, 0)[-len(answer[0][0]) :]
        assert await r.is_empty() < SOON
        assert r.client.stats.kv_blocks_used == 0


async def test_a_request_that_the_engine_refuses_affects_no_other_request() -> None:
    async with rig() as r:
        stream = r.client.submit(request("long", prompt=[1] * (LIMITS.max_model_len + 1), n=2))
        errors = [chunk async for chunks in stream for chunk in chunks]
        assert [(c.index, c.finish_reason) for c in errors] == [(0, "error"), (1, "error")]
        assert all(c.error for c in errors)
        good = request("good")
        assert await collect(r.client.submit(good)) == {0: (expected(good), "length")}
        assert r.monitor.num_restarts == 0


async def test_a_busy_engine_without_grammars_answers_a_grammar_check_with_a_reason() -> None:
    async with rig(Behaviour(step_seconds=0.005)) as r:
        stream = r.client.submit(request("r", 50_000))
        assert await r.client.check_grammar("{}")
        await stream.aclose()


async def test_a_loading_engine_reports_progress_and_refuses_requests() -> None:
    async with rig(Behaviour(load_seconds=0.5), wait=False) as r:
        with pytest.raises(EngineLoadingError):
            _ = r.client.info
        with pytest.raises(EngineLoadingError) as loading:
            r.client.submit(request("early"))
        assert loading.value.retry_after
        await until(lambda: r.client.status.phase == "load", "the phase is shown")
        assert (r.client.status.progress, r.client.status.message) == (0.5, "half of it")
        await r.ready()
        assert r.client.info.model == "fake"
        assert r.client.info.engine_id


async def test_the_request_of_a_reader_that_does_not_read_is_aborted() -> None:
    limits = ClientLimits(ping_interval=0.05, max_pending_tokens=50, slow_reader_patience=0.3)
    async with rig(Behaviour(step_seconds=0.001), client=limits) as r:
        slow = r.client.submit(request("slow", 50_000))
        quick = asyncio.ensure_future(collect(r.client.submit(request("quick", 400))))
        await until(lambda: r.client.num_in_flight == 1 or quick.done(), "one of them ends")
        assert len((await quick)[0][0]) == 400
        await r.is_empty()
        assert slow.num_pending_tokens > 50
        with pytest.raises(RequestTimeoutError) as dropped:
            await collect(slow)
        assert dropped.value.code == "slow_reader"


def test_kill_9_of_the_engine_fails_streams_at_once_and_service_returns() -> None:
    async def scene() -> None:
        async with rig(Behaviour(step_seconds=0.002)) as r:
            streams = [r.client.submit(request(f"r{i}", 50_000)) for i in range(50)]
            await asyncio.gather(*(anext(s) for s in streams))
            first = r.client.info.engine_id
            r.kill()
            results = await asyncio.gather(*(collect(s) for s in streams), return_exceptions=True)
            assert all(isinstance(e, EngineDeadError) for e in results)
            assert len({id(e) for e in results}) == 50  # tracebacks are not shared
            assert {(e.status, e.code) for e in results} == {(503, "engine_restarted")}
            assert r.client.status.state == "dead"  # the streams did not wait for the next engine
            assert r.client.stats.num_running == 0
            with pytest.raises(EngineDeadError):
                r.client.submit(request("now"))
            await r.ready()
            asked = request("after")
            assert await collect(r.client.submit(asked)) == {0: (expected(asked), "length")}
            assert r.client.info.engine_id != first
            assert r.client.num_in_flight == 0

    run(scene(), "uvloop")


async def test_a_step_that_raises_fails_all_requests_and_the_engine_is_replaced() -> None:
    async with rig(Behaviour(step_seconds=0.002, fail_at_step=20)) as r:
        streams = [r.client.submit(request(f"r{i}", 50_000)) for i in range(3)]
        first = r.client.info.engine_id
        results = await asyncio.gather(*(collect(s) for s in streams), return_exceptions=True)
        assert all(isinstance(e, EngineDeadError) for e in results)
        # Heartbeats that the failed process still sends must not count as a new engine.
        await until(lambda: r.client.status.state == "ready", "ready again")
        assert r.client.info.engine_id != first
        await until(lambda: r.monitor.num_restarts == 1, "a restart")
        assert any(s.state == "dead" and "fake device failed" in s.message for s, _ in r.told)
        await r.ready()
        asked = request("after", 5)
        assert await collect(r.client.submit(asked)) == {0: (expected(asked), "length")}


async def test_closing_the_client_aborts_its_requests() -> None:
    async with rig(Behaviour(step_seconds=0.002)) as r, started(RemoteClient(r.directory)) as observer:
        stream = r.client.submit(request("r", 50_000))
        await anext(stream)
        await until(lambda: observer.stats.num_running == 1, "the other client sees it run")
        await r.client.close()
        await r.client.close()
        with pytest.raises(EngineDeadError):
            await collect(stream)
        assert await until(lambda: observer.stats.num_running == 0, "it is aborted") < SOON


async def test_two_clients_do_not_see_each_others_tokens() -> None:
    async with rig(Behaviour(step_seconds=0.002)) as r, started(RemoteClient(r.directory)) as other:
        await until(lambda: other.status.state == "ready", "the second client is ready")
        mine, theirs = request("a", 300), request("b", 300, seed=8)
        same = request("a", 10)  # refused, because the other client uses this id
        stream = r.client.submit(mine)
        await until(lambda: stream.num_pending_tokens > 0, "the first client's request runs")
        answers = await asyncio.gather(
            collect(stream), collect(other.submit(theirs)), collect(other.submit(same))
        )
        assert answers[0] == {0: (expected(mine), "length")}
        assert answers[1] == {0: (expected(theirs), "length")}
        assert answers[2][0][1] == "error"


async def test_two_processes_share_the_capacity_of_the_engine() -> None:
    one, two = (ServerConfig(max_queued_requests=2, api_server_count=count) for count in (1, 2))
    async with (
        rig(Behaviour(step_seconds=0.005, max_num_seqs=2), queue=one) as r,
        started(RemoteClient(r.directory, queue=two)) as half,
    ):
        await until(lambda: half.status.state == "ready", "the second client is ready")
        streams = [half.submit(request(f"h{i}", 50_000)) for i in range(2)]
        with pytest.raises(QueueFullError):
            half.submit(request("h2"))
        with pytest.raises(QueueFullError):
            half.reserve({"h2": 1, "h3": 1})
        with pytest.raises(RequestError, match="at most 4"):
            half.reserve({"h2": 3, "h3": 2})
        await asyncio.gather(*(stream.aclose() for stream in streams))
        half.reserve({"h2": 2, "h3": 2})
        streams = [half.submit(request(name, 3, n=2)) for name in ("h2", "h3")]
        half.release(["h2", "h3"])
        assert len(await collect(streams[0])) == len(await collect(streams[1])) == 2


async def test_a_silent_engine_counts_as_dead_until_it_sends_heartbeats_again() -> None:
    """The supervisor's timeout is long here, so that it does not kill the engine first."""
    patient, watch = (
        ClientLimits(ping_interval=0.1, engine_silence=0.6),
        WatchLimits(heartbeat_timeout=60.0),
    )
    async with rig(Behaviour(step_seconds=0.005), client=patient, watch=watch) as r:
        stream = r.client.submit(request("r", 50_000))
        await anext(stream)
        r.kill(signal.SIGSTOP)
        try:
            with pytest.raises(EngineDeadError, match="silent"):
                await collect(stream)
            assert r.client.status.state == "dead"
        finally:
            r.kill(signal.SIGCONT)
        await r.ready()
        asked = request("r", 10)  # the same id: the old request ended with its connection
        await r.is_empty()
        assert await collect(r.client.submit(asked)) == {0: (expected(asked), "length")}
        assert r.monitor.num_restarts == 0


async def test_the_streams_of_a_client_that_was_silent_for_too_long_fail() -> None:
    """A process that was stopped for a while is silent, too. Its streams must not wait forever."""
    drowsy = ClientLimits(ping_interval=3.0)
    async with rig(Behaviour(step_seconds=0.005), client=drowsy, client_timeout=0.5) as r:
        stream = r.client.submit(request("r", 50_000))
        with pytest.raises(EngineDeadError, match="silent"):
            await collect(stream)
        assert r.client.num_in_flight == 0
        assert r.client.status.state == "ready"
        asked = request("r", 10)  # the same engine takes it: the old request is gone
        assert await collect(r.client.submit(asked)) == {0: (expected(asked), "length")}
        assert r.monitor.num_restarts == 0
