"""The monitor: hangs, deaths, giving up; and its decisions alone, with a clock of our own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.wire import Heartbeat, encode, heartbeat_address
from chorale.config import EngineConfig, ServerConfig
from chorale.serve.bootstrap import (
    EXIT_CONFIG,
    EXIT_FAILED,
    ApiStart,
    EngineStart,
    loop_factory,
    make_directory,
)
from chorale.serve.engine_monitor import EngineMonitor, spawn
from chorale.serve.watch import LastHeartbeat, RestartPolicy, WatchLimits
from tests.support import PATIENCE
from tests.support.serve.fake_engine import Behaviour
from tests.support.serve.harness import collect, expected, is_alive, request, rig, run, until

QUICK = WatchLimits(heartbeat_timeout=3.0, dump_grace=0.05, kill_grace=1.0)


def test_a_stopped_engine_is_killed_and_replaced() -> None:
    async def scene() -> None:
        async with rig(Behaviour(step_seconds=0.002), watch=QUICK) as r:
            stream = r.client.submit(request("r", 50_000))
            await anext(stream)
            first = r.engine_pid
            os.kill(first, signal.SIGSTOP)
            await until(lambda: not is_alive(first), "it is killed")
            with pytest.raises(Exception, match="engine process ended"):
                await collect(stream)
            await r.ready()
            assert any("no heartbeat" in status.message for status, _ in r.told)
            asked = request("after")
            assert await collect(r.client.submit(asked)) == {0: (expected(asked), "length")}

    run(scene())


def test_a_step_that_hangs_is_seen_though_the_heart_beats(capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        limits = WatchLimits(step_timeout=0.5, dump_grace=0.3)
        async with rig(Behaviour(step_seconds=60.0), watch=limits) as r:
            first = r.engine_pid
            stream = r.client.submit(request("r"))
            await until(lambda: not is_alive(first), "it is killed")
            with pytest.raises(Exception, match="engine process ended"):
                await collect(stream)
            await until(lambda: r.told[-1][0].state != "ready", "the death is told")
            assert any("one step has been running" in status.message for status, _ in r.told)

    run(scene())
    stacks = capfd.readouterr().err
    assert "Current thread" in stacks or "Thread 0x" in stacks  # where it hung, for the operator
    assert "fake_executor.py" in stacks


def test_a_long_step_is_not_mistaken_for_a_hang() -> None:
    async def scene() -> None:
        async with rig(Behaviour(step_seconds=4.5), watch=QUICK) as r:
            asked = request("r", 1)
            assert await collect(r.client.submit(asked)) == {0: (expected(asked), "length")}
            assert r.monitor.num_restarts == 0

    run(scene())


def test_a_process_that_cannot_be_started_counts_as_a_death() -> None:
    """As when the machine has no memory for it: that may pass, so it is tried again."""

    async def scene() -> None:
        folder = make_directory()
        directory = folder.path
        start = EngineStart(directory=str(directory), config=Behaviour().encode(), parent_pid=os.getpid())
        told: list[EngineStatus] = []
        monitor = EngineMonitor(
            start,
            command=["/nonexistent/engine"],
            limits=WatchLimits(backoff=0.01, max_failed_starts=3),
            on_status=lambda status, _: told.append(status),
        )
        assert await monitor.run() == EXIT_FAILED
        assert [status.state for status in told] == ["dead", "dead", "failed"]
        assert all("could not be started" in status.message for status in told)
        folder.remove()

    run(scene())


def test_five_deaths_and_it_gives_up() -> None:
    async def scene() -> None:
        limits = WatchLimits(backoff=0.01)
        async with rig(Behaviour(crash="no such device"), watch=limits, wait=False) as r:
            assert await asyncio.wait_for(asyncio.shield(r.running), PATIENCE) == EXIT_FAILED
            assert r.monitor.num_restarts == 4
            last, _ = r.told[-1]
            assert last.state == "failed"
            assert "no such device" in last.message
            assert sum(status.state == "dead" for status, _ in r.told) == 4
            r.client.mark_failed(last.message)
            assert r.client.status.state == "failed"

    run(scene())


def test_a_configuration_that_cannot_run_is_not_tried_again() -> None:
    async def scene() -> None:
        async with rig(Behaviour(refuse="tensor x is missing in file y"), wait=False) as r:
            assert await asyncio.wait_for(asyncio.shield(r.running), PATIENCE) == EXIT_CONFIG
            assert r.monitor.num_restarts == 0
            assert r.told[-1][0].message == "tensor x is missing in file y"
            assert r.monitor.failure is not None
            assert r.monitor.failure.deterministic

    run(scene())


def test_stopping_while_loading() -> None:
    async def scene() -> None:
        async with rig(Behaviour(load_seconds=60.0), wait=False) as r:
            await until(lambda: r.client.status.phase == "load", "it loads")
            start = time.monotonic()
            r.monitor.stop()
            assert await r.running == 0
            assert time.monotonic() - start < 30.0  # half of what loading takes

    run(scene())


def test_status_tells_progress_then_the_info() -> None:
    async def scene() -> None:
        async with rig(Behaviour(load_seconds=0.4)) as r:
            await until(lambda: r.told and r.told[-1][0].state == "ready", "ready is told")
            assert [s.phase for s, _ in r.told if s.state == "loading"][-1] == "load"
            info = r.told[-1][1]
            assert isinstance(info, EngineInfo)
            assert info.engine_id == r.client.info.engine_id
            assert len(r.told) < 10  # changes only, not every beat

    run(scene())


# --------------------------------------------------------------------------- decisions


def beat(state: str = "ready", step: float = 0.0, p99: float = 0.0, device: str = "cuda") -> Heartbeat:
    info = EngineInfo(model="m", max_model_len=1, max_num_seqs=1, device=device)
    return Heartbeat(engine_id="e", pid=1, state=state, step_seconds=step, p99_step_seconds=p99, info=info)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heard", "silence", "complains"),
    [
        (beat(), 4.9, False),
        (beat(), 5.1, True),
        (beat("loading"), 100.0, False),
        (beat("loading"), 121.0, True),
        (None, 100.0, False),
        (None, 121.0, True),
        (beat(step=29.0), 0.0, False),
        (beat(step=31.0), 0.0, True),
        (beat(step=31.0, p99=2.0), 0.0, False),  # 20 x 2 s
        (beat(step=41.0, p99=2.0), 0.0, True),
        (beat(step=599.0, device="CPU, 2 threads"), 0.0, False),
        (beat(step=601.0, device="CPU, 2 threads"), 0.0, True),
    ],
)
def test_when_an_engine_counts_as_hung(heard: Heartbeat | None, silence: float, complains: bool) -> None:
    last_heartbeat = LastHeartbeat(WatchLimits(), heard_at=50.0)
    if heard is not None:
        last_heartbeat.hear(heard, 50.0)
    assert (last_heartbeat.hang_reason(50.0 + silence) is not None) == complains


def test_back_off_doubles_and_old_deaths_are_forgotten() -> None:
    deaths = RestartPolicy(WatchLimits())
    assert [deaths.add(float(t), was_ready=False) for t in range(5)] == [0.1, 0.2, 0.4, 0.8, None]
    deaths = RestartPolicy(WatchLimits())
    delays = [deaths.add(t * 100.0, was_ready=False) for t in range(10)]
    assert delays[-1] == pytest.approx(0.8)  # four in any 5 minutes


def test_back_off_has_a_maximum() -> None:
    deaths = RestartPolicy(WatchLimits(backoff=1.0, max_backoff=10.0, max_failed_starts=8))
    delays = [deaths.add(float(t), was_ready=False) for t in range(8)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, None]


def test_deaths_of_processes_that_were_ready_are_forgiven_longer() -> None:
    deaths = RestartPolicy(WatchLimits())
    assert [deaths.add(float(t), was_ready=True) for t in range(20)] == [0.1] * 19 + [None]
    deaths = RestartPolicy(WatchLimits())
    assert None not in [deaths.add(t * 20.0, was_ready=True) for t in range(100)]  # three a minute
    deaths = RestartPolicy(WatchLimits())
    mixed = [deaths.add(float(t), was_ready=t % 2 == 0) for t in range(10)]
    assert mixed == [0.1, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4, 0.8, 0.8, None]  # the fifth failed start


def test_an_engine_that_is_killed_six_times_is_there_again() -> None:
    """Five failed starts would end it: processes that were ready do not count as those."""

    async def scene() -> None:
        async with rig() as r:
            for _ in range(6):
                first = r.engine_pid
                os.kill(first, signal.SIGKILL)
                await until(lambda first=first: r.monitor.pid not in (None, first), "a new process")
                await r.ready()
            asked = request("after")
            assert await collect(r.client.submit(asked)) == {0: (expected(asked), "length")}
            assert r.monitor.num_restarts == 6

    run(scene())


def test_an_engine_that_dies_whenever_it_is_ready_is_given_up_in_the_end() -> None:
    async def scene() -> None:
        async with rig(watch=WatchLimits(max_deaths=3)) as r:
            while not r.running.done():
                if r.told[-1][0].state == "ready" and r.monitor.pid is not None:
                    os.kill(r.monitor.pid, signal.SIGKILL)
                    await until(lambda: r.told[-1][0].state != "ready", "the death is told")
                await asyncio.sleep(0.01)
            assert await r.running == EXIT_FAILED
            assert r.monitor.num_restarts == 2

    run(scene())


PRINT_NAMES = (
    sys.executable,
    "-S",
    "-c",
    "import os, sys; open(sys.argv[1], 'w').write(' '.join(os.environ))",
)
SEARCH_KEYS = {"EXA_API_KEY", "YDC_API_KEY", "BRAVE_API_KEY", "TAVILY_API_KEY", "CHORALE_TOOLS_API_KEY"}


@pytest.mark.parametrize(
    ("is_engine", "hidden"), [(True, SEARCH_KEYS), (False, set())], ids=["engine", "api"]
)
def test_a_child_inherits_the_environment_without_keys(
    is_engine: bool, hidden: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Keys of clients reach no child; keys of search services reach the HTTP processes alone."""
    for name in ("CHORALE_API_KEY", "VLLM_API_KEY", *SEARCH_KEYS, "ANYTHING_ELSE"):
        monkeypatch.setenv(name, "x")
    engine = EngineStart(directory="/d", config=EngineConfig(), parent_pid=1)
    api = ApiStart(
        directory="/d", server=ServerConfig(), model="m", api_key_hashes=(), socket_fds=(), parent_pid=1
    )

    async def scene() -> None:
        process = await spawn((*PRINT_NAMES, str(tmp_path / "names")), engine if is_engine else api)
        assert await process.wait() == 0

    run(scene())
    found = set((tmp_path / "names").read_text().split())
    expected = {"ANYTHING_ELSE"} | SEARCH_KEYS - hidden
    assert found & {"CHORALE_API_KEY", "VLLM_API_KEY", "ANYTHING_ELSE", *SEARCH_KEYS} == expected


def test_heartbeats_of_another_process_are_not_those_of_the_engine() -> None:
    """As those of a former engine that has not ended yet: the new one must not count as ready."""

    async def scene() -> None:
        folder = make_directory()
        told: list[EngineStatus] = []
        start = EngineStart(directory=str(folder.path), config=EngineConfig(), parent_pid=os.getpid())
        monitor = EngineMonitor(
            start,
            command=(sys.executable, "-S", "-c", "import time; time.sleep(120)"),
            limits=QUICK,
            on_status=lambda status, _: told.append(status),
        )
        with zmq.Context() as context, context.socket(zmq.PUB) as heartbeats:
            heartbeats.setsockopt(zmq.LINGER, 0)
            heartbeats.bind(heartbeat_address(folder.path))
            running = asyncio.ensure_future(monitor.run())
            await until(lambda: monitor.pid is not None, "it is started")
            assert monitor.pid is not None
            former = msgspec.structs.replace(beat(), pid=monitor.pid + 1)
            own = msgspec.structs.replace(beat("loading"), pid=monitor.pid)
            while not told:
                heartbeats.send(encode(former))
                heartbeats.send(encode(own))
                await asyncio.sleep(0.02)
            assert [status.state for status in told] == ["loading"]
            monitor.stop()
            assert await running == 0
        folder.remove()

    run(scene())


def test_the_directory_is_private_and_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with make_directory() as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert long not in directory.parents
        assert list(long.iterdir()) == []


def test_loops_of_several_threads_start_processes_at_the_same_time() -> None:
    """uvloop raises an error if two of its loops start one at once."""
    together = threading.Barrier(4)

    async def scene() -> list[int]:
        start = EngineStart(directory="", config=EngineConfig(), parent_pid=os.getpid())
        together.wait(30.0)
        async with asyncio.timeout(30.0):
            return [await (await spawn(["true"], start)).wait() for _ in range(25)]

    def in_a_thread(_: int) -> list[int]:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(scene())

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(in_a_thread, range(4))) == [[0] * 25] * 4
