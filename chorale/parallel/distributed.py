"""Communicators over torch's process groups: gloo between CPUs, NCCL (RCCL) between GPUs, HCCL between NPUs.

The groups are made directly, so that a program that uses ``LLM`` keeps its own default group.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chorale.parallel.communicator import CommunicationError, Communicator, Exchange
from chorale.parallel.peer_memory import NamedGroup, PeerMemory, symmetric_memory

logger = logging.getLogger(__name__)
# A last resort: channels detect ranks that end or hang much earlier (``processes.py``).
TIMEOUT = timedelta(minutes=10)
LOOK = timedelta(milliseconds=200)  # interval of checks whether an exchange was aborted
CLOSE_SECONDS = 5.0


class GroupCommunicator(Communicator):
    """The parts that all kinds of groups share."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self._exchanges: list[Exchange] = []
        self.rank, self.size = rank, size

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Each rank adds all tensors itself, so the order of additions depends neither on the rank nor on an
        element's position."""
        first, *others = self.all_gather(tensor).unbind(0)
        for part in others:
            first += part
        return tensor.copy_(first)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.new_empty(self.size, *tensor.shape)
        self.is_waiting = True
        with _failures():
            self._wait(self._group.allgather([list(found.unbind(0))], [tensor.contiguous()]))
        self.is_waiting = False
        return found

    def _wait(self, work: Any) -> None:
        work.wait()

    def watch(self, exchange: Exchange) -> None:
        self._exchanges.append(exchange)

    def check(self) -> None:
        for exchange in self._exchanges:
            exchange.check()

    def abort(self) -> None:
        for exchange in self._exchanges:
            exchange.set_limit(0.0)
        self._group.abort()

    def close(self) -> None:
        self._group.shutdown()


class Gloo(GroupCommunicator):
    """Ranks on CPUs of one machine, connected over the loopback interface."""

    def __init__(self, meeting_point: Path, rank: int, size: int, timeout: timedelta = TIMEOUT) -> None:
        """``meeting_point``: a file in a private folder, the same for all ranks; it must not exist yet.

        Waits for all ranks. Raises ``CommunicationError``.
        """
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        self._is_aborted = False
        with _failures():
            store = dist.FileStore(str(meeting_point), size)  # type: ignore[attr-defined]
            super().__init__(dist.ProcessGroupGloo(store, rank, size, options), rank, size)

    def _wait(self, work: Any) -> None:
        """Wait for an exchange, or until ``abort`` is called: gloo does not always notice a killed peer."""
        while not _is_done(work, LOOK):
            if self._is_aborted:
                _leak(self._group)
                raise CommunicationError("the exchange between ranks was aborted")

    def abort(self) -> None:
        self._is_aborted = True


class Nccl(GroupCommunicator):
    """Ranks on GPUs of one machine; RCCL in a ROCm build. Its calls can be captured in a graph."""

    def __init__(
        self, meeting_point: Path, rank: int, size: int, device: torch.device, timeout: timedelta = TIMEOUT
    ) -> None:
        """As ``Gloo``. ``device``: this rank's device, which must be the current one."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _failures():
            store = dist.FileStore(str(meeting_point), size)  # type: ignore[attr-defined]
            super().__init__(dist.ProcessGroupNCCL(store, rank, size, options), rank, size)
            self._device, self._folder = device, meeting_point.parent
            inner = KeysFromZero(dist.PrefixStore("peer memory", store))  # type: ignore[attr-defined]
            self._named = NamedGroup(f"chorale ranks {meeting_point}", rank, size, inner)
            # Connects the ranks, which must not happen during a capture.
            self.all_reduce_(torch.zeros(1, device=device))
            self.all_gather(torch.zeros(1, device=device))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.new_empty(self.size, *tensor.shape)
        with _failures():
            self._group._allgather_base(found, tensor.contiguous()).wait()
        return found

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """As in ``Communicator``, but NCCL chooses the order of additions. Every rank gets the same bits."""
        with _failures():
            self._group.allreduce([tensor]).wait()
        return tensor

    def peer_memory(self, num_bytes: int, device: torch.device) -> PeerMemory | None:
        """Must be called on all ranks. If one rank cannot reach its peers' memory, all ranks use NCCL."""
        found, why = None, unreachable(self.rank, self.size)
        if not self._any(bool(why), device):  # if one rank failed, none may wait for it
            try:
                with sockets_in(self._folder):
                    found = symmetric_memory(num_bytes, self._named.name, device, self._barrier)
            except RuntimeError as error:
                why = (str(error).splitlines() or [type(error).__name__])[0]
        if not self._any(found is None, device):
            return found
        self.why_no_peers = why or "another rank cannot reach its peers' memory"
        return None

    def _any(self, own: bool, device: torch.device) -> bool:
        """Returns whether ``own`` is true on some rank."""
        return bool(self.all_gather(torch.tensor([own], dtype=torch.float32, device=device)).any())

    def close(self) -> None:
        """Close the group, which ends when all ranks close theirs, or after ``CLOSE_SECONDS``."""
        self._named.close()
        if not ends_within(self._group.shutdown, CLOSE_SECONDS):
            _leak(self._group)
            logger.warning("NCCL did not close; its memory is freed when this process ends")

    def _barrier(self) -> None:
        self.all_reduce_(torch.zeros(1, device=self._device))
        torch.cuda.synchronize(self._device)


class Hccl(GroupCommunicator):
    """Ranks on Ascend NPUs of one machine. Never run on an NPU."""

    def __init__(self, meeting_point: Path, rank: int, size: int, timeout: timedelta = TIMEOUT) -> None:
        """As ``Gloo``. This rank's device must be the current one."""
        groups = importlib.import_module("torch_npu")._C._distributed_c10d.ProcessGroupHCCL
        options = groups.Options()
        options._timeout = timeout
        with _failures():
            store = dist.FileStore(str(meeting_point), size)  # type: ignore[attr-defined]
            super().__init__(groups(store, rank, size, options), rank, size)

    def abort(self) -> None:
        """Do nothing: exchanges with a lost rank last until this process ends (``RankProcesses``) or
        ``TIMEOUT``."""
        for exchange in self._exchanges:
            exchange.set_limit(0.0)

    def close(self) -> None:
        return None  # closed with the process: no call of torch_npu is known to end in bounded time


def unreachable(rank: int, size: int) -> str:
    """Returns why the GPU of ``rank`` cannot access another rank's memory, or "" if it can."""
    for other in range(size):
        if other != rank and not torch.cuda.can_device_access_peer(rank, other):
            return f"GPU {rank} cannot access the memory of GPU {other}"
    return ""


@contextmanager
def sockets_in(folder: Path) -> Iterator[None]:
    """Make torch's symmetric memory put its sockets into ``folder``, which must be the same on all ranks.

    By default the sockets are in TMPDIR and named after process ids, but containers that share a TMPDIR may
    have equal ids, and a long path does not fit into a socket's name.
    """
    tempfile.gettempdir()  # caches the usual folder for all other callers
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def ends_within(action: Callable[[], None], seconds: float) -> bool:
    """Run ``action`` in a thread. Returns whether it has ended; if not, it is left running."""
    thread = threading.Thread(target=action, name="close", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _is_done(work: Any, timeout: timedelta) -> bool:
    """Wait for an exchange. Returns whether it is done. Raises ``RuntimeError`` if it failed."""
    try:
        work.wait(timeout)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises if it failed; otherwise it ended just after the timeout
    return True


def _leak(group: Any) -> None:
    """Keep a group until the process ends: its destructor waits for exchanges that may never end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def connect(
    meeting_point: Path, rank: int, size: int, device: torch.device, seconds: int | None = None
) -> Communicator:
    """Connect this process to the other ranks. ``seconds``: the longest exchange; None: ``TIMEOUT``.

    Raises ``CommunicationError``."""
    timeout = TIMEOUT if seconds is None else timedelta(seconds=seconds)
    if device.type == "cuda":
        return Nccl(meeting_point, rank, size, device, timeout)
    if device.type == "npu":
        return Hccl(meeting_point, rank, size, timeout)
    return Gloo(meeting_point, rank, size, timeout)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(f"the exchange between ranks failed: {error}") from error


_Store: Any = dist.Store  # type: ignore[attr-defined]


class KeysFromZero(_Store):  # type: ignore[misc]
    """Wraps the store ``inner`` and numbers each kind of exchange from 0. Other keys are passed on unchanged.

    torch numbers the exchanges of symmetric memory per process: "CUDASymmetricMemory.../7/1" is the message
    of rank 1 in the eighth. When a process starts a second engine, its count continues, but the new engine's
    other ranks, which are new processes, begin at 0: they would wait for each other until the time limit.

    torch keeps no reference to a store made in Python, so its user must.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner
        self._first: dict[str, int] = {}  # kind -> number of its first exchange

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        found: bytes = self._inner.get(self._renumbered(key))
        return found

    def wait(self, keys: list[str], *limit: object) -> None:
        self._inner.wait([self._renumbered(key) for key in keys], *limit)

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check([self._renumbered(key) for key in keys]))

    def _renumbered(self, key: str) -> str:
        kind, *numbers = key.rsplit("/", 2)
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            return key
        first = self._first.setdefault(kind, int(numbers[0]))
        return f"{kind}/{int(numbers[0]) - first}/{numbers[1]}"
