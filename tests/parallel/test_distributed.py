"""Connections between ranks: what closing them waits for, and GPUs that cannot reach each other's memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from chorale.config.engine import EngineConfig
from chorale.kernels.ops import StepSizes
from chorale.kernels.triton.shared_ops import shared_ops
from chorale.machine.hardware import Hardware
from chorale.model.config_writer import make_config
from chorale.parallel import distributed
from chorale.parallel.communicator import Silent
from chorale.parallel.distributed import GroupCommunicator, Nccl, ends_within, sockets_in
from chorale.parallel.peer_memory import PeerMemory, simulated_memory
from chorale.parallel.rank import Rank
from chorale.parallel.shares import make_shares
from chorale.runtime.sizing.resolve import resolve
from chorale.serve.engine.build_rank import ops_over_peers
from chorale.serve.engine.ranks import RankDevice, exchange_of, note_slow_exchange
from tests.parallel.test_shared_model import ODD


def test_a_library_that_does_not_close_in_time_is_left_running() -> None:
    never = threading.Event()

    def wait() -> None:
        never.wait(60)

    began = time.monotonic()
    assert not ends_within(wait, 0.05)
    assert time.monotonic() - began < 30
    assert ends_within(lambda: None, 30)
    never.set()


SLOW = """
import os, sys, time
from pathlib import Path
import torch
from chorale.parallel.communicator import CommunicationError
from chorale.parallel.distributed import connect
child = os.fork()
communicator = connect(Path(sys.argv[1]), 1 if child == 0 else 0, 2, torch.device("cpu"), 2)
if child == 0:
    time.sleep(600)
try:
    communicator.all_gather(torch.zeros(1))
except CommunicationError:
    print("failed", flush=True)
os.kill(child, 9)
os.waitpid(child, 0)
os._exit(0)
"""


def test_an_exchange_fails_after_the_timeout_of_the_operator(tmp_path: Path) -> None:
    command = (sys.executable, "-c", SLOW, str(tmp_path / "ranks"))
    found = subprocess.run(command, stdout=subprocess.PIPE, timeout=300, check=True)
    assert found.stdout == b"failed\n"


# Two ranks on CPUs, of which the second connects and then takes part in no exchange.
ABORTED = """
import os, sys, threading, time
from pathlib import Path
import torch
from chorale.parallel.communicator import CommunicationError
from chorale.parallel.distributed import Gloo
from chorale.machine.processes import die_with_parent
parent = os.getpid()
if os.fork() == 0:
    die_with_parent(parent)
    silent = Gloo(Path(sys.argv[1]), 1, 2)
    silent.all_gather(torch.ones(3))
    time.sleep(600)
communicator = Gloo(Path(sys.argv[1]), 0, 2)
communicator.all_gather(torch.ones(3))
threading.Timer(0.5, communicator.abort).start()
began = time.monotonic()
try:
    communicator.all_gather(torch.ones(3))
except CommunicationError as error:
    print(error)
communicator.close()
del communicator
print(time.monotonic() - began)
"""


def test_an_exchange_on_cpus_can_be_aborted(tmp_path: Path) -> None:
    """The silent rank lives on, so gloo has nothing to notice; the process must still end."""
    command = [sys.executable, "-c", ABORTED, str(tmp_path / "meeting")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    said, seconds = done.stdout.splitlines()
    assert said == "the exchange between ranks was aborted"
    assert float(seconds) < 10


# --------------------------------------------------------------------------- without peer access


class NcclOverGloo(Nccl):
    """NCCL's communicator with a group of CPUs in its place."""

    def __init__(self, meeting_point: Path, rank: int, size: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        store = dist.FileStore(str(meeting_point), size)  # type: ignore[attr-defined]
        GroupCommunicator.__init__(self, dist.ProcessGroupGloo(store, rank, size, options), rank, size)
        self._device, self._folder = torch.device("cpu"), meeting_point.parent
        self._named: Any = SimpleNamespace(name="ranks", close=lambda: None)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return GroupCommunicator.all_gather(self, tensor)


@pytest.mark.parametrize("unable", [{0}, {1}, {0, 1}, set()])
def test_ranks_agree_on_nccl_if_one_cannot_reach_the_others(
    unable: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = threading.local()

    def allocate(num_bytes: int, name: str, device: torch.device, barrier: Any) -> PeerMemory:
        if ranks.own in unable:
            raise RuntimeError("CUDA driver error: peer access is not supported\nException raised from ...")
        return simulated_memory(num_bytes, ranks.own, 2, device)

    def sockets_in(folder: Path) -> nullcontext[None]:
        folders.append(folder)
        return nullcontext()  # the ranks of this test are threads of one process

    folders: list[Path] = []
    monkeypatch.setattr(distributed, "symmetric_memory", allocate)
    monkeypatch.setattr(distributed, "sockets_in", sockets_in)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: True)

    def run(rank: int) -> tuple[PeerMemory | None, str, float]:
        ranks.own = rank
        communicator = NcclOverGloo(tmp_path / "meeting", rank, 2)
        memory = communicator.peer_memory(4096, torch.device("cpu"))
        total = communicator.all_reduce_(torch.tensor([rank + 1.0]))  # NCCL's sums still work
        return memory, communicator.why_no_peers, float(total)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert [total for *_, total in found] == [3.0, 3.0]
    assert folders == [tmp_path, tmp_path]
    if not unable:
        assert all(memory is not None and why == "" for memory, why, _ in found)
        return
    for rank, (memory, why, _) in enumerate(found):
        assert memory is None
        expected = (
            "CUDA driver error: peer access is not supported" if rank in unable else "another rank cannot "
        )
        assert why.startswith(expected)
        assert "Exception raised" not in why


def test_the_driver_is_asked_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU of two is on another bus: neither rank may wait for the other's memory."""

    def allocate(*_: object) -> PeerMemory:
        raise AssertionError("allocated")

    monkeypatch.setattr(distributed, "symmetric_memory", allocate)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: own == 0)

    def run(rank: int) -> str:
        communicator = NcclOverGloo(tmp_path / "meeting", rank, 2)
        assert communicator.peer_memory(4096, torch.device("cpu")) is None
        return communicator.why_no_peers

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert found == ["another rank cannot reach its peers' memory", "GPU 1 cannot access the memory of GPU 0"]


def test_sockets_of_symmetric_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    with contextlib.suppress(RuntimeError), sockets_in(tmp_path):
        assert os.environ["TMPDIR"] == str(tmp_path)
        raise RuntimeError("torch cannot bind it")
    assert os.environ["TMPDIR"] == "/elsewhere"
    monkeypatch.delenv("TMPDIR")
    with sockets_in(tmp_path):
        pass
    assert "TMPDIR" not in os.environ


def gpu_rank_device(rank: int, why: str = "") -> RankDevice:
    """A rank's place on a stand-in for a GPU."""
    communicator = Silent(rank, 2)
    communicator.why_no_peers = why
    device: Any = SimpleNamespace(torch_device=torch.device("cuda", rank))
    hardware = Hardware("cuda", "NVIDIA L40S", 48 * 2**30, 47 * 2**30)
    return RankDevice(device, hardware, Rank(make_shares(make_config(**ODD), 2)[rank], communicator))


def test_a_slow_exchange_is_noted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model, config = make_config(**ODD), EngineConfig(tensor_parallel_size=2)
    resolved = resolve(config, model, Hardware("cuda", "NVIDIA L40S", 48 * 2**30, 47 * 2**30))
    for rank in range(2):
        found = note_slow_exchange(config, gpu_rank_device(rank, "peer access is not supported"), resolved)
        assert "NCCL" in found.notes[-1]
        assert "reach each other's memory (peer access is not supported)" in found.notes[-1]
    assert caplog.text.count("slower than Chorale's all-reduce") == 1  # by rank 0
    asked = EngineConfig(tensor_parallel_size=2, disable_custom_all_reduce=True)
    assert note_slow_exchange(asked, gpu_rank_device(0), resolved) is resolved


def test_how_ranks_exchange() -> None:
    assert exchange_of(gpu_rank_device(0), is_over_peers=True) == "peers"
    assert exchange_of(gpu_rank_device(0), is_over_peers=False) == "nccl"
    alone: Any = SimpleNamespace(torch_device=torch.device("cpu"))
    assert exchange_of(RankDevice(alone, Hardware("cpu", "CPU", 1, 1)), is_over_peers=False) == ""


def test_chorales_all_reduce_can_be_switched_off() -> None:
    rank = Rank(make_shares(make_config(**ODD), 2)[0], Silent(0, 2))
    ops = shared_ops(rank)
    assert ops.over_peers is not None
    sizes = StepSizes(2880, 64, torch.bfloat16)
    config = EngineConfig(tensor_parallel_size=2, disable_custom_all_reduce=True)
    assert ops_over_peers(config, ops, sizes, torch.device("cpu")) is None
    missing = Rank(rank.share, NoPeers(0, 2))
    config = EngineConfig(tensor_parallel_size=2)
    assert ops_over_peers(config, shared_ops(missing), sizes, torch.device("cpu")) is None


class NoPeers(Silent):
    def peer_memory(self, num_bytes: int, device: torch.device) -> PeerMemory | None:
        return None
