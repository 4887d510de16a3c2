"""Processes that belong together: a child that ends with its parent, and whether another process hangs.

A child ends however its parent ends, also by SIGKILL. Linux sends it a signal when its parent's thread ends.
Elsewhere, or if the kernel refuses to, a thread of the child polls for its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

EXIT_ORPHANED = 1
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.5  # between two looks for the parent, if the system sends no signal
HEARTBEAT_TIMEOUT = 5.0  # seconds of silence after which an engine or a rank counts as hung
LOADING_TIMEOUT = 120.0  # the same while it loads: importing torch from a cold disk holds the GIL for long
_LONGEST_LOOK = 1.0  # seconds that one check adds at most: a late check has missed signs of life
_DOUBT = 0.25  # fraction of the limit after which the system is asked
_RUN = "import runpy, sys; sys.path[:] = {path!r}; runpy.run_module({name!r}, None, '__main__', True)"


def module_command(name: str) -> tuple[str, ...]:
    """Returns the command that runs the module ``name`` of Chorale in a child. Arguments may follow.

    The child imports what this process imports. ``python -m`` would look into the current folder first, where
    another ``chorale`` may be.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = [entry for entry in sys.path if os.path.isabs(entry)]
    if root not in map(os.path.realpath, path):  # this process found it through a relative entry
        path.insert(0, root)
    return (sys.executable, "-P", "-c", _RUN.format(path=path, name=name))


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed when process ``parent_pid``, which has started it, ends.

    Exits at once if the parent has ended already: it may die between the start of this process and this call,
    so the child must learn ``parent_pid`` from the parent and not from the system. On Linux the signal comes
    when the *thread* that started this process ends: start such children in the main thread.
    """
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        threading.Thread(target=_end_with, args=(parent_pid,), name="parent", daemon=True).start()
    if os.getppid() != parent_pid:  # an orphan gets another parent
        raise SystemExit(EXIT_ORPHANED)


def end(code: int) -> NoReturn:
    """Ends this process without freeing its objects, which takes 0.13 s of CPU if it has imported torch.

    A normal exit would also wait in libraries for ranks that have already ended.
    """
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def how_ended(code: int) -> str:
    """Returns how a process with this exit code ended, as a predicate."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def settle_signals(ignored: Sequence[signal.Signals] = ()) -> None:
    """Makes SIGUSR1 write the stacks of all threads to stderr, and SIGUSR2 do nothing. Neither is fatal.

    ``ignored``: signals that the parent handles. Main thread only.
    """
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    for number in (signal.SIGUSR2, *ignored):
        signal.signal(number, signal.SIG_IGN)


def _end_with(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_LOOK_SECONDS)
    os._exit(EXIT_ORPHANED)


_TUNED = threading.Event()  # set once this process has called ``tune_garbage_collector``


def tune_garbage_collector() -> None:
    """Make the cycle collector run rarely, and never over the objects that exist now.

    An engine step allocates an object for each row, and wakes every stream at once. The default threshold
    (700 objects) then collects several times a step, to no effect: 50 of 420 us a step at 1,024 rows in the
    engine, 3 of 25 us a token at 512 streams in the server (benchmarks/serving/http_host_cost.py).
    """
    gc.freeze()
    collect_rarely()
    _TUNED.set()


def collect_rarely() -> None:
    """Make the cycle collector run rarely, from the start of a process.

    Imports make many objects and no garbage: at the default threshold, collections are a sixth of the CPU
    time of importing the engine with torch (``import chorale.serve.engine.build``: 1.75 s, 1.45 without).
    """
    gc.set_threshold(50_000, 20, 20)


@contextlib.contextmanager
def quiet_collector(thresholds: tuple[int, int, int] = (50_000, 20, 20)) -> Iterator[None]:
    """Makes the collector run rarely for a while. Unfreezes at the end unless objects were frozen before."""
    # Counting visits every frozen object: 30 ms for 400,000.
    before, is_frozen = gc.get_threshold(), _TUNED.is_set() or gc.get_freeze_count() > 0
    if not is_frozen:
        gc.freeze()
    gc.set_threshold(*thresholds)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not is_frozen:
            gc.unfreeze()


@contextlib.contextmanager
def quick_switching() -> Iterator[None]:
    """Sets the thread switch interval to 1 ms for a while.

    With the default of 5 ms, a thread that parses a large body would limit streams to 200 events a second.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class ThreadTimes(NamedTuple):
    """State of one thread: whether it runs or could, and its seconds on a processor and waiting for one."""

    is_runnable: bool
    on_cpu: float
    waited: float


def threads_of(pid: int) -> dict[str, ThreadTimes]:
    """Returns the times of a process's threads by their ids; empty if the system does not show them."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                folder = Path(f"/proc/{pid}/task/{thread}")
                state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
                on_cpu, waited, _ = (folder / "schedstat").read_bytes().split()
                found[thread] = ThreadTimes(state == b"R", int(on_cpu) / 1e9, int(waited) / 1e9)
    return found


class Silence:
    """For how long another process has given no sign of life, in seconds that count against it.

    Time in which one of its threads was ready to run and got no processor does not count: on a busy machine,
    or under a quota, a process is slow. One that sleeps, is stopped, or spins counts as hung. A
    process that the system does not show (``pid`` None, another machine, no /proc) is given twice the time.
    """

    def __init__(
        self,
        pid: int | None,
        now: float,
        read: Callable[[int], dict[str, ThreadTimes]] = threads_of,
    ) -> None:
        self.pid, self._read = pid, read
        self.hear(now)

    def hear(self, now: float) -> None:
        """Call at every sign of life."""
        self.seconds = 0.0
        self._looked_at = now
        self._threads: dict[str, ThreadTimes] = {}

    def exceeds(self, now: float, limit: float) -> bool:
        """Returns whether ``limit`` is exceeded. Call about twice a second, after reading signs of life."""
        passed, self._looked_at = now - self._looked_at, now
        if self.seconds > limit * _DOUBT:
            passed -= self._starved(passed)
        self.seconds += min(passed, _LONGEST_LOOK)
        return self.seconds > limit

    def _starved(self, passed: float) -> float:
        """Returns for how many of the last ``passed`` seconds a thread waited for a processor."""
        before, self._threads = self._threads, {} if self.pid is None else self._read(self.pid)
        if not self._threads:
            return passed / 2
        both = [(each, before[name]) for name, each in self._threads.items() if name in before]
        # The system counts a wait when it ends, but not under a quota: there, a runnable thread does not run.
        waits = [
            max(each.waited - last.waited, passed - (each.on_cpu - last.on_cpu))
            if each.is_runnable and last.is_runnable
            else each.waited - last.waited
            for each, last in both
        ]
        return min(max(waits, default=0.0), passed)


class Pulse:
    """The signs of life of a process that works in steps, and the duration of its current step."""

    def __init__(self, pid: int | None, now: float) -> None:
        self.silence, self.step = Silence(pid, now), Silence(pid, now)
        self.busy = 0.0
        self._heard_at = now

    def hear(self, now: float, busy: float = 0.0) -> None:
        """``busy``: the seconds for which its current step has been running, as it reports."""
        self.silence.hear(now)
        if busy <= now - self._heard_at:  # another step than last time, or none
            self.step.hear(now)
        self.busy, self._heard_at = busy, now

    def is_silent(self, now: float, limit: float) -> bool:
        return self.silence.exceeds(now, limit)

    def is_stuck(self, now: float, limit: float) -> bool:
        """Returns whether its step takes longer than ``limit``, not counting waits for a processor."""
        return self.step.exceeds(now, limit) and self.busy > limit
