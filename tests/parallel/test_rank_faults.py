"""Ranks that die, hang or cannot start: the engine's error names the rank, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from chorale.config.engine import EngineConfig
from chorale.engine.core import EngineCore
from chorale.errors import ChoraleError, ConfigError, EngineError, GpuError
from chorale.measure.bench.checkpoint_writer import write_random_checkpoint
from chorale.model.config_writer import make_config
from chorale.parallel.communicator import CommunicationError, Communicator
from chorale.parallel.processes import RankProcesses
from chorale.runtime.executor import LocalExecutor
from chorale.serve.engine.build import build_engine
from chorale.serve.engine.rank_process import CurrentStep
from tests.parallel.test_shared_model import ODD
from tests.support.event_loop import wait_until
from tests.support.processes import children, exists
from tests.support.runtime import make_engine, random_prompt, request

NOTICED = 3.0  # seconds
SLOW_MACHINE = 3.0  # more, where a machine has two busy cores


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which must be empty at the end."""
    folder = tmp_path / "private"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def ranks_of(core: EngineCore) -> RankProcesses:
    executor = core._executor
    assert isinstance(executor, LocalExecutor)
    assert executor._others is not None
    return executor._others.processes


def shared_memory(pids: Sequence[int]) -> set[str]:
    """What these processes have left: torch names its shared memory after the process that made it."""
    return {name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids)}


def end_of(core: EngineCore) -> tuple[str, float]:
    """Steps until the engine fails: what it says, and when."""
    for _ in range(100_000):
        try:
            core.step()
        except EngineError as error:
            return error.message, time.monotonic()
    raise AssertionError("the engine did not fail")


@pytest.mark.parametrize(
    ("phase", "size"),
    [("decode", 2), *(pytest.param(each, 4, marks=pytest.mark.slow) for each in ("decode", "prefill"))],
)
def test_a_rank_that_is_killed(odd: Path, private: Path, size: int, phase: str) -> None:
    before, memory = children(os.getpid()), shared_memory([os.getpid()])
    core = make_engine(odd, tensor_parallel_size=size, max_num_batched_tokens=64, max_model_len=4096)
    pids = ranks_of(core).pids
    assert len(pids) == size - 1
    if phase == "decode":
        core.add_request(request("a", random_prompt(10), max_tokens=4000, seed=1))
        for _ in range(8):
            core.step()
    else:
        core.add_request(request("a", random_prompt(4000), max_tokens=1, seed=1))
        core.step()
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(pids[-1], signal.SIGKILL)

    timer = threading.Timer(0.1, kill)
    timer.start()
    message, ended = end_of(core)
    timer.join()
    assert f"rank {size - 1} (process {pids[-1]}) was killed by SIGKILL" in message
    assert ended - killed[0] < NOTICED
    assert core.take_chunks()[0].finish_reason == "error"
    core.shutdown()
    assert not any(map(exists, pids))
    assert children(os.getpid()) <= before
    assert shared_memory([os.getpid(), *pids]) <= memory
    assert list(private.iterdir()) == []


def test_a_rank_that_hangs(odd: Path, private: Path) -> None:
    core = make_engine(odd, tensor_parallel_size=2, heartbeat_timeout=1.0)
    (pid,) = ranks_of(core).pids
    core.add_request(request("a", random_prompt(10), max_tokens=900, seed=1))
    core.step()
    stopped = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    message, ended = end_of(core)
    assert f"rank 1 (process {pid}) hangs" in message
    assert ended - stopped < NOTICED + SLOW_MACHINE
    core.shutdown()
    assert not exists(pid)


# A rank on a stand-in for a GPU with a fault in the fourth step.
FAULTY_RANK = """
import dataclasses, sys, time
import torch
from chorale.runtime.worker import Worker
from chorale.serve.engine import build_rank, rank_process

def open_device(*arguments, **options):
    device = opened(*arguments, **options)
    hardware = dataclasses.replace(device.hardware, label="GPU 1 (NVIDIA H200, GPU-1a2b, 00000000:1b:00.0)")
    return dataclasses.replace(device, hardware=hardware)

def run_step(self, plan):
    if plan.step_id >= 3:
        {fault}
    return run(self, plan)

opened, build_rank.open_device = build_rank.open_device, open_device
run, Worker.run = Worker.run, run_step
sys.exit(rank_process.main())
"""
STUCK = "time.sleep(600)"  # its beats go on
ECC = 'raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")'


def with_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, "-c", FAULTY_RANK.format(fault=fault))
    monkeypatch.setattr("chorale.serve.engine.ranks.RANK_COMMAND", command)


def test_a_rank_is_stuck_if_its_part_of_a_step_does_not_end(
    odd: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(STUCK, monkeypatch)
    monkeypatch.setattr("chorale.parallel.rank_state.BUSY_SECONDS", {"cpu": 1.0})
    core = make_engine(odd, tensor_parallel_size=2)
    (pid,) = ranks_of(core).pids
    core.add_request(request("a", random_prompt(10), max_tokens=900, seed=1))
    began = time.monotonic()
    message, ended = end_of(core)
    assert f"rank 1 (process {pid}) hangs: its part of one step has been running for 1." in message
    assert ended - began < 1.0 + NOTICED + SLOW_MACHINE
    core.shutdown()
    assert not exists(pid)


def test_a_rank_that_waits_for_another_is_not_busy() -> None:
    step = CurrentStep()
    assert step.busy == 0.0
    step.began = time.monotonic() - 60
    assert step.busy >= 60
    communicator = Communicator()
    communicator.is_waiting = True
    step.communicator = communicator
    assert step.busy == 0.0


def test_a_rank_that_dies_while_the_engine_is_idle(odd: Path, private: Path) -> None:
    """A step may wait for a device for ever: then ``on_lost``, called by another thread, ends the process."""
    lost: list[ChoraleError] = []
    config = EngineConfig(model=str(odd), tensor_parallel_size=2, num_threads=1, max_model_len=128)
    core, _ = build_engine(config, on_lost=lost.append)
    (pid,) = ranks_of(core).pids
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: lost, "the loss is told", NOTICED)
    assert [error.message for error in lost] == [f"rank 1 (process {pid}) was killed by SIGKILL"]
    with pytest.raises(EngineError, match=r"rank 1 .* SIGKILL"):
        core.use_idle_time()
    core.add_request(request("a", [1, 2, 3]))
    with pytest.raises(EngineError, match=r"rank 1 .* SIGKILL"):
        core.step()
    core.shutdown()


def test_a_rank_that_ends_while_it_loads(odd: Path, private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "chorale.serve.engine.ranks.RANK_COMMAND", (sys.executable, "-c", "raise SystemExit(9)")
    )
    config = EngineConfig(model=str(odd), tensor_parallel_size=2, num_threads=1, max_model_len=128)
    with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) ended with code 9"):
        build_engine(config)
    assert list(private.iterdir()) == []


FAILING = """
import sys, time, msgspec
from multiprocessing.connection import Connection
from chorale.parallel.channel import Channel
from chorale.parallel.wire import Failed, encode
channel = Channel(Connection(int(sys.argv[1])))
time.sleep(2 * (sys.argv[2] == "a peer is gone"))  # ranks that lost a peer report after it
channel.send(encode(Failed(sys.argv[2], sys.argv[3])))
"""


def failing(size: int, victims: str, culprit: str = "") -> RankProcesses:
    """Ranks that report these reasons; rank 2 the culprit's."""

    def launch(rank: int, descriptor: int) -> tuple[Sequence[str], bytes]:
        reason = culprit if culprit and rank == 2 else victims
        message = "it broke" if reason == culprit else "a peer is gone"
        return (sys.executable, "-c", FAILING, str(descriptor), message, reason), b""

    return RankProcesses(size, launch)


@pytest.mark.parametrize(
    ("culprit", "victims", "kind"),
    [
        ("config", "exchange", ConfigError),
        ("other", "exchange", EngineError),
        ("gpu", "other", GpuError),
    ],
)
def test_the_first_cause_is_named(culprit: str, victims: str, kind: type[Exception]) -> None:
    """Ranks whose exchange failed are the victims of another; so are others beside a failed GPU."""
    ranks = failing(4, victims, culprit)
    with pytest.raises(kind, match=r"rank 2.*it broke"):
        ranks.wait_ready()
    ranks.close()


@pytest.mark.parametrize(
    ("victims", "error"),
    [("exchange", EngineError("step 3 failed")), ("other", GpuError("GPU 0 has an error"))],
)
def test_an_error_of_rank_0_is_not_blamed_on_what_others_report_because_of_it(
    victims: str, error: EngineError
) -> None:
    ranks = failing(2, victims)
    found = ranks.cause(error)
    assert (type(found), found.message) == (type(error), f"rank 0: {error.message}")
    if victims == "exchange":
        assert "rank 1 " in ranks.cause(CommunicationError("rank 1 did not take part")).message
    ranks.close()


def test_an_ecc_error_of_a_rank_names_rank_and_gpu(
    odd: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(ECC, monkeypatch)
    core = make_engine(odd, tensor_parallel_size=2)
    (pid,) = ranks_of(core).pids
    core.add_request(request("a", random_prompt(10), max_tokens=900, seed=1))
    began = time.monotonic()
    message, ended = end_of(core)
    assert ended - began < NOTICED + SLOW_MACHINE
    assert f"rank 1 (process {pid}) failed: a step failed: GPU 1 (NVIDIA H200, GPU-1a2b" in message
    assert "nvidia-smi --gpu-reset -i 00000000:1b:00.0" in message
    with pytest.raises(GpuError):
        ranks_of(core).check()
    core.shutdown()


def test_a_command_that_does_not_exist() -> None:
    before = children(os.getpid())
    with pytest.raises(EngineError, match="a rank could not be started"):
        RankProcesses(3, lambda rank, descriptor: (("/nowhere/python",), b""))
    assert children(os.getpid()) <= before


LONE = """
import sys, time
from chorale.config.engine import EngineConfig
from chorale.serve.engine.build import build_engine
options = {"tensor_parallel_size": 2, "num_threads": 1, "max_model_len": 128}
core, _ = build_engine(EngineConfig(model=sys.argv[1], **options))
print(*core._executor._others.processes.pids, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ranks_end_with_the_process_that_started_them(odd: Path, how: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", LONE, str(odd)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        pids = [int(pid) for pid in output.readline().split()]
    assert len(pids) == 1
    process.send_signal(how)
    process.wait()
    wait_until(lambda: not any(map(exists, pids)), "the end of the ranks", NOTICED)


@pytest.mark.parametrize(
    ("size", "said"), [(3, "must be one of 1, 2, 4, 8"), (8, "too few columns|too few token ids")]
)
def test_an_impossible_number_of_ranks_is_refused(tmp_path: Path, size: int, said: str) -> None:
    folder = write_random_checkpoint(tmp_path / "m", make_config(**{**ODD, "inter": 4 * 64}), seed=3)
    before = children(os.getpid())
    with pytest.raises(ConfigError, match=said):
        make_engine(folder, tensor_parallel_size=size)
    assert children(os.getpid()) <= before
