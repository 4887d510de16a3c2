"""A child process that ends with its parent, however the parent ends, also by SIGKILL.

Linux sends the child a signal when its parent's thread ends. Elsewhere, or if the kernel refuses to, a
thread of the child looks for the parent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

EXIT_ORPHANED = 1
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.5  # between two looks, where the system sends no signal


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


def settle_signals(ignored: Sequence[signal.Signals] = ()) -> None:
    """SIGUSR1 writes the stacks of all threads to stderr, SIGUSR2 does nothing; their default ends a process.

    ``ignored``: signals that are somebody else's business. Main thread only.
    """
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    for number in (signal.SIGUSR2, *ignored):
        signal.signal(number, signal.SIG_IGN)


def _end_with(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_LOOK_SECONDS)
    os._exit(EXIT_ORPHANED)


def tune_garbage_collector() -> None:
    """Make the cycle collector run rarely, and never over the objects that exist now.

    An engine step allocates an object for each row, and wakes every stream at once. The default threshold
    (700 objects) then collects several times a step, to no effect: 50 of 420 us a step at 1,024 rows in the
    engine, 3 of 25 us a token at 512 streams in the server (benchmarks/http_host_cost.py).
    """
    gc.freeze()
    collect_rarely()


def collect_rarely() -> None:
    """Make the cycle collector run rarely, from the start of a process.

    Imports make many objects and no garbage: at the default threshold, collections are a sixth of the CPU
    time of importing the engine with torch (``import chorale.serve.engine.build``: 1.75 s, 1.45 without).
    """
    gc.set_threshold(50_000, 20, 20)
