"""The engine monitor with real processes, and its decisions with a fake clock."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from chorale.client.base import EngineInfo
from chorale.client.wire.messages import Heartbeat, encode, heartbeat_address
from chorale.config.engine import EngineConfig, ServerConfig
from chorale.errors import EngineDeadError
from chorale.machine.processes import threads_of
from chorale.serve.bootstrap import (
    EXIT_FAILED,
    ApiStart,
    EngineStart,
    loop_factory,
    make_directory,
)
from chorale.serve.engine_monitor import spawn
from chorale.serve.watch import EnginePulse, RestartPolicy, WatchLimits
from tests.support import PATIENCE
from tests.support.processes import is_running
from tests.support.serve.fake_engine import Behaviour
from tests.support.serve.harness import collect, engines, expected, request, rig, until
from tests.support.serve.quota import cpu_quota, has_quotas

QUICK = WatchLimits(heartbeat_timeout=1.5, dump_grace=0.05, kill_grace=1.0)


async def test_a_stopped_engine_is_killed_and_replaced() -> None:
    async with rig(Behaviour(step_seconds=0.002), watch=QUICK) as r:
        stream = r.client.submit(request("r", 50_000))
        await anext(stream)
        first = r.pid
        os.kill(first, signal.SIGSTOP)
        await until(lambda: not is_running(first), "it is killed")
        with pytest.raises(Exception, match="engine process ended"):
            await collect(stream)
        await r.ready()
        assert any("no heartbeat" in status.message for status, _ in r.told)
        asked = request("after")
        assert await collect(r.client.submit(asked)) == {0: (expected(asked), "length")}


@pytest.mark.parametrize("manner", ["asleep", "spinning"])
async def test_an_engine_that_keeps_the_interpreter_lock_is_replaced(manner: str) -> None:
    limits = WatchLimits(heartbeat_timeout=1.0, dump_grace=0.05)
    async with rig(Behaviour(hold=manner), watch=limits) as r:
        first = r.pid
        stream = r.client.submit(request("r"))
        await until(lambda: not is_running(first), "it is killed", 120)
        with pytest.raises(EngineDeadError):
            await collect(stream)
        await until(lambda: r.told[-1][0].state != "ready", "the death is reported")
        assert any("no heartbeat" in status.message for status, _ in r.told)


@pytest.mark.skipif(not has_quotas(), reason="needs a control group for CPU quotas")
async def test_an_engine_with_little_cpu_time_is_not_replaced() -> None:
    """Its step holds the GIL for 0.2 to 0.5 s of CPU time, which takes seconds at 5 % of a core."""
    limits = WatchLimits(heartbeat_timeout=1.0)
    with cpu_quota(5) as enter:
        async with rig(Behaviour(hold="busy"), watch=limits) as r:
            enter(r.pid)
            asked = request("r", 1)
            began = time.monotonic()
            assert await collect(r.client.submit(asked)) == {0: (expected(asked), "length")}
            assert time.monotonic() - began > 2.0  # twice the limit
            assert r.monitor.num_restarts == 0


async def test_the_timeout_doubles_with_each_kill_and_clients_learn_it() -> None:
    async with rig(watch=WatchLimits(heartbeat_timeout=0.5, dump_grace=0.05)) as r:
        first = r.pid
        assert r.client.silence_limit == 1.0  # clients wait twice as long as the engine's timeout
        os.kill(first, signal.SIGSTOP)
        await until(lambda: r.monitor.pid not in (None, first), "a new process", 120)
        await until(lambda: r.client.silence_limit == 2.0, "the client knows", 120)


async def test_a_hung_step_is_noticed_although_heartbeats_continue(capfd: pytest.CaptureFixture[str]) -> None:
    limits = WatchLimits(step_timeout=0.5, dump_grace=0.3)
    async with rig(Behaviour(step_seconds=60.0), watch=limits) as r:
        first = r.pid
        stream = r.client.submit(request("r"))
        await until(lambda: not is_running(first), "it is killed")
        with pytest.raises(Exception, match="engine process ended"):
            await collect(stream)
        await until(lambda: r.told[-1][0].state != "ready", "the death is reported")
        assert any("one step has been running" in status.message for status, _ in r.told)
    stacks = capfd.readouterr().err
    assert "Current thread" in stacks or "Thread 0x" in stacks  # shows the operator where it hung
    assert "fake_executor.py" in stacks


async def test_a_process_that_cannot_be_started_counts_as_a_death() -> None:
    """The cause may be temporary, for example too little memory, so the start is repeated."""
    limits = WatchLimits(backoff=0.01, max_failed_starts=3)
    async with engines(command=["/nonexistent/engine"], watch=limits) as [engine]:
        assert await engine.running == EXIT_FAILED
        assert [status.state for status, _ in engine.told] == ["dead", "dead", "failed"]
        assert all("could not be started" in status.message for status, _ in engine.told)


# --------------------------------------------------------------------------- decisions


def beat(state: str = "ready", step: float = 0.0, p99: float = 0.0, device: str = "cuda") -> Heartbeat:
    info = EngineInfo(model="m", max_model_len=1, max_num_seqs=1, device=device)
    return Heartbeat(engine_id="e", pid=1, state=state, step_seconds=step, p99_step_seconds=p99, info=info)  # type: ignore[arg-type]


@pytest.fixture
def sleeper() -> Iterator[int]:
    """The id of a process that sleeps, and no longer waits for a processor to start."""
    with subprocess.Popen("cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdout.read(1)
        while any(thread.is_runnable for thread in threads_of(process.pid).values()):
            time.sleep(0.01)
        yield process.pid
        process.kill()


@pytest.mark.parametrize(
    ("state", "silence", "complains"),
    [
        ("ready", 4.8, False),
        ("ready", 5.2, True),
        ("loading", 119.0, False),
        ("loading", 121.0, True),
        (None, 119.0, False),
        (None, 121.0, True),
    ],
)
def test_an_engine_counts_as_hung_after_a_time_of_silence(
    state: str | None, silence: float, complains: bool, sleeper: int
) -> None:
    pulse = EnginePulse(WatchLimits(), 5.0, sleeper, 50.0)
    if state is not None:
        pulse.hear(beat(state), 50.0)
    reasons = [pulse.hang_reason(50.0 + look / 10) for look in range(1, round(silence * 10) + 1)]
    assert any(reasons) == complains


@pytest.mark.parametrize(
    ("device", "p99", "seconds", "complains"),
    [
        ("cuda", 0.0, 29.0, False),
        ("cuda", 0.0, 31.0, True),
        ("cuda", 2.0, 39.0, False),  # 20 x 2 s
        ("cuda", 2.0, 41.0, True),
        ("CPU, 2 threads", 0.0, 599.0, False),
        ("CPU, 2 threads", 0.0, 601.0, True),
    ],
)
def test_a_step_counts_as_hung_after_its_limit(
    device: str, p99: float, seconds: float, complains: bool, sleeper: int
) -> None:
    pulse = EnginePulse(WatchLimits(), 5.0, sleeper, 50.0)
    reasons = []
    for look in range(round(seconds * 5) + 1):
        pulse.hear(beat(step=look / 5, p99=p99, device=device), 50.0 + look / 5)
        reasons.append(pulse.hang_reason(50.0 + look / 5))
    assert any(reasons) == complains
    pulse.hear(beat(step=0.01, p99=p99, device=device), 51.0 + seconds)  # the next step
    assert pulse.hang_reason(51.0 + seconds) is None


def test_back_off_doubles_and_old_deaths_are_forgotten() -> None:
    deaths = RestartPolicy(WatchLimits())
    assert [deaths.add(float(t), was_ready=False) for t in range(5)] == [0.1, 0.2, 0.4, 0.8, None]
    deaths = RestartPolicy(WatchLimits())
    delays = [deaths.add(t * 100.0, was_ready=False) for t in range(10)]
    assert delays[-1] == pytest.approx(0.8)  # four failed starts in the 5 minutes of the window


def test_back_off_has_a_maximum() -> None:
    deaths = RestartPolicy(WatchLimits(backoff=1.0, max_backoff=10.0, max_failed_starts=8))
    delays = [deaths.add(float(t), was_ready=False) for t in range(8)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, None]


def test_more_deaths_are_allowed_after_successful_starts() -> None:
    deaths = RestartPolicy(WatchLimits())
    assert [deaths.add(float(t), was_ready=True) for t in range(20)] == [0.1] * 19 + [None]
    deaths = RestartPolicy(WatchLimits())
    assert None not in [deaths.add(t * 20.0, was_ready=True) for t in range(100)]  # three per minute
    deaths = RestartPolicy(WatchLimits())
    mixed = [deaths.add(float(t), was_ready=t % 2 == 0) for t in range(10)]
    assert mixed == [0.1, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4, 0.8, 0.8, None]  # the fifth failed start


def test_each_hang_doubles_the_back_off_and_the_timeout() -> None:
    deaths = RestartPolicy(WatchLimits())
    growth = [deaths.growth(0.0)]
    delays = []
    for t in range(5):
        delays.append(deaths.add(float(t), was_ready=True, is_hang=True))
        growth.append(deaths.growth(float(t)))
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert growth == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert deaths.growth(400.0) == 1.0  # old hangs are forgotten


PRINT_ENVIRONMENT = (
    sys.executable,
    "-S",
    "-c",
    "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))",
)
SEARCH_KEYS = {"EXA_API_KEY", "YDC_API_KEY", "BRAVE_API_KEY", "TAVILY_API_KEY", "CHORALE_TOOLS_API_KEY"}


@pytest.mark.parametrize(
    ("is_engine", "hidden"), [(True, SEARCH_KEYS), (False, set())], ids=["engine", "api"]
)
async def test_a_child_inherits_the_environment_without_keys(
    is_engine: bool, hidden: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No child gets the API keys of clients; only the HTTP processes get those of search services. An engine
    gets the variables of its start, which select its devices."""
    for name in ("CHORALE_API_KEY", "VLLM_API_KEY", *SEARCH_KEYS, "ANYTHING_ELSE"):
        monkeypatch.setenv(name, "x")
    own = {"CUDA_VISIBLE_DEVICES": "GPU-7"}
    engine = EngineStart(directory="/d", config=EngineConfig(), parent_pid=1, environment=own)
    api = ApiStart(
        directory="/d", server=ServerConfig(), model="m", api_key_hashes=(), socket_fds=(), parent_pid=1
    )

    process = await spawn((*PRINT_ENVIRONMENT, str(tmp_path / "variables")), engine if is_engine else api)
    assert await process.wait() == 0
    found = json.loads((tmp_path / "variables").read_text())
    assert (found.get("CUDA_VISIBLE_DEVICES") == "GPU-7") == is_engine
    expected = {"ANYTHING_ELSE"} | SEARCH_KEYS - hidden
    assert found.keys() & {"CHORALE_API_KEY", "VLLM_API_KEY", "ANYTHING_ELSE", *SEARCH_KEYS} == expected


async def test_heartbeats_of_an_earlier_engine_process_are_ignored() -> None:
    """An earlier engine process may still be ending; the new one must not count as ready."""
    silent = (sys.executable, "-S", "-c", "import time; time.sleep(120)")
    with zmq.Context() as context, context.socket(zmq.PUB) as heartbeats:
        heartbeats.setsockopt(zmq.LINGER, 0)
        async with engines(command=silent, watch=QUICK) as [engine]:
            heartbeats.bind(heartbeat_address(engine.directory))
            await until(lambda: engine.monitor.pid is not None, "it is started")
            former = msgspec.structs.replace(beat(), pid=engine.pid + 1)
            own = msgspec.structs.replace(beat("loading"), pid=engine.pid)
            while not engine.told:
                heartbeats.send(encode(former))
                heartbeats.send(encode(own))
                await asyncio.sleep(0.02)
            assert [status.state for status, _ in engine.told] == ["loading"]
            engine.monitor.stop()
            assert await engine.running == 0


def test_the_directory_is_private_and_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with make_directory() as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert long not in directory.parents
        assert list(long.iterdir()) == []


def test_loops_of_several_threads_start_processes_at_the_same_time() -> None:
    """uvloop raises an error if two of its loops start processes at the same time."""
    together = threading.Barrier(4)

    async def scene() -> list[int]:
        start = EngineStart(directory="", config=EngineConfig(), parent_pid=os.getpid())
        together.wait(PATIENCE)
        async with asyncio.timeout(PATIENCE):
            return [await (await spawn(["true"], start)).wait() for _ in range(10)]

    def in_a_thread(_: int) -> list[int]:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(scene())

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(in_a_thread, range(4))) == [[0] * 10] * 4
