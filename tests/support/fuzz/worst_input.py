"""Measures an entry point with its worst input: CPU time per megabyte, the longest hold, peak memory.

All times are CPU times, so they hold on a busy machine. A *hold* is a stretch in which no other Python thread
can run (the interpreter lock is held), or the event loop runs no other callback. Two ways to measure::

    cost = measure(lambda: parse(data), len(data))          # a function, called in a separate thread

    async with watched() as cost:                            # on the event loop that runs the server
        cost.num_bytes = await flood(server.port, pieces, seconds=2)

    cost.check()                                             # the limits for all entry points

``flood`` sends pieces from a thread and reads the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import random
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chorale.machine.processes import quick_switching, quiet_collector

MAX_HELD_SECONDS = 0.05
MAX_MEMORY = 4.0  # as a multiple of the input, in addition to MEMORY_CONSTANT
MEMORY_CONSTANT = 24 * 2**20
_LOOK_SECONDS = 0.001


@dataclass
class Cost:
    """``num_bytes`` is the size of the input, which a flood sets at its end."""

    num_bytes: int = 0
    cpu_seconds: float = 0.0  # CPU time of the process, without the measuring itself
    held_seconds: float = 0.0
    peak_bytes: int = 0  # growth of the resident memory

    @property
    def cpu_per_mb(self) -> float:
        return self.cpu_seconds / max(self.num_bytes / 1e6, 1e-9)

    @property
    def memory(self) -> float:
        """Peak growth as a multiple of the input."""
        return self.peak_bytes / max(self.num_bytes, 1)

    def __str__(self) -> str:
        return (
            f"{self.num_bytes / 1e6:.2f} MB: {self.cpu_per_mb:.3f} CPU s/MB, "
            f"held {self.held_seconds * 1e3:.0f} ms, "
            f"memory +{self.peak_bytes / 2**20:.0f} MiB ({self.memory:.1f} x)"
        )

    def is_within(self, max_cpu_seconds: float) -> bool:
        return self.held_seconds <= MAX_HELD_SECONDS and self.cpu_seconds <= max_cpu_seconds

    def check(self, *, max_cpu_seconds: float | None = None) -> None:
        """Asserts the limits. ``max_cpu_seconds``: the stated cap of work that is not linear."""
        print(self)
        assert self.held_seconds <= MAX_HELD_SECONDS, self
        assert self.peak_bytes <= MAX_MEMORY * self.num_bytes + MEMORY_CONSTANT, self
        assert max_cpu_seconds is None or self.cpu_seconds <= max_cpu_seconds, self


async def check_best(measured: Callable[[], Awaitable[Cost]], *, max_cpu_seconds: float) -> None:
    """Asserts the limits of one of up to eight measurements, with growing pauses between them.

    Every measurement includes the costs of the code, but not every one includes those of a busy host: the
    time for which a virtual processor is suspended counts as CPU time of its thread.
    """
    for attempt in range(8):
        await asyncio.sleep(attempt * 0.2)
        cost = await measured()
        if cost.is_within(max_cpu_seconds):
            break
    cost.check(max_cpu_seconds=max_cpu_seconds)


def check_linear(work: Callable[[int], tuple[Callable[[], Any], int]], small: int, times: int = 8) -> Cost:
    """Asserts that ``times`` as much input costs about ``times`` as much; returns the cost of the larger one.

    ``work(size)`` returns the call and the number of its bytes. A quadratic call costs ``times`` as much per
    byte; 3 leaves room for caches and a busy machine.
    """
    less, more = (measure(*work(size)) for size in (small, small * times))
    assert more.cpu_seconds <= 3 * times * max(less.cpu_seconds, 0.001), f"not linear: {less}; {more}"
    return more


def measure(work: Callable[[], Any], num_bytes: int) -> Cost:
    """Measures a call of ``work`` in a thread. Raises the exceptions of ``work``."""
    faults: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=run)
    cost = Cost(num_bytes)
    with _measured(cost) as looks:
        thread.start()
        while thread.is_alive():
            looks.look()
            thread.join(_LOOK_SECONDS)
    if faults:
        raise faults[0]
    return cost


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Cost]:
    """Measures this process while the body runs, sampling from the event loop's own thread."""
    cost = Cost()
    with _measured(cost) as looks:
        looking = asyncio.create_task(_look_on(looks))
        try:
            yield cost
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


async def _look_on(looks: _Looks) -> None:
    while True:
        looks.look()
        await asyncio.sleep(_LOOK_SECONDS)


@contextlib.contextmanager
def _measured(cost: Cost) -> Iterator[_Looks]:
    if any(gc.get_count()[1:]):  # otherwise a collection here would find little
        gc.collect()
        gc.freeze()  # the next measurement does not visit the same objects again: 1.7 s in a long run
    ctypes.CDLL(None).malloc_trim(0)  # memory freed by earlier tests would hide growth
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    # As in a server. Collecting the garbage of earlier tests would hold the lock for 50 ms.
    # A server switches threads after 1 ms, too. Only a call that keeps the lock can then hold it for long.
    with quiet_collector(gc.get_threshold()), _on_one_processor(), quick_switching():
        looks, started = _Looks(), time.process_time()
        yield looks
        looks.look()
        cost.cpu_seconds = time.process_time() - started - looks.own_seconds
        cost.held_seconds = looks.held_seconds
        cost.peak_bytes = max(0, _status("VmHWM") - before)


class _Looks:
    """Reads the CPU clocks of all threads, from one thread that needs the interpreter lock to do so.

    Between two readings, CPU time of the reading thread was used by other callbacks of its event loop; CPU
    time of another thread is a hold.
    """

    def __init__(self) -> None:
        self._tid = threading.get_native_id()
        self._used = self._clocks()
        self.held_seconds = self.own_seconds = 0.0

    def look(self) -> None:
        began, used = time.thread_time(), self._clocks()
        for tid, seconds in used.items():
            self.held_seconds = max(self.held_seconds, seconds - self._used.get(tid, 0.0))
        self._used = used
        self._used[self._tid] = time.thread_time()  # the reading itself is not a hold
        self.own_seconds += self._used[self._tid] - began

    def _clocks(self) -> dict[int, float]:
        found = {}
        for tid in _threads():
            with contextlib.suppress(OSError):  # it has ended
                found[tid] = time.clock_gettime((~tid << 3) | 6)  # a thread's CPU clock: clock_getres(2)
        return found


@contextlib.contextmanager
def _on_one_processor() -> Iterator[None]:
    """Runs all threads on one processor.

    A thread that waits for a processor does not read the clocks. On a single processor, the other threads
    cannot use much CPU time in the meantime, however busy the machine is.
    """
    allowed = os.sched_getaffinity(0)
    chosen = {random.choice(sorted(allowed))}
    _run_on(chosen)
    try:
        yield
    finally:
        _run_on(allowed)


def _run_on(processors: set[int]) -> None:
    for tid in _threads():
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(tid, processors)


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


async def flood(port: int, pieces: Iterable[bytes], *, seconds: float, reads: bool = True) -> int:
    """Sends pieces on one connection until they end, the server closes it, or the time is over.

    Returns the number of bytes that were sent. ``reads``: reads and drops the answers.
    """
    return await asyncio.to_thread(_flood, port, pieces, seconds, reads)


def _flood(port: int, pieces: Iterable[bytes], seconds: float, reads: bool) -> int:
    sent, end = 0, time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", port)) as connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        for piece in pieces:
            rest = memoryview(piece)
            while rest and time.monotonic() < end:
                if reads:
                    with contextlib.suppress(BlockingIOError):
                        connection.recv(2**20)
                try:
                    number = connection.send(rest)
                except BlockingIOError:
                    time.sleep(0.005)
                    continue
                sent, rest = sent + number, rest[number:]
            if rest:
                break
    return sent
