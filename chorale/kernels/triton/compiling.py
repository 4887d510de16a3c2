"""Compiling before launching: steps are played without their kernels, which threads compile meanwhile.

Triton compiles a kernel when it is first launched, in the launching thread. While ``Compiling.playing`` is
in force, launches of its thread end where a kernel would go to the device: what is not in memory becomes a
job for threads (the compiler's passes and ptxas run without the interpreter's lock; only the walk over a
kernel's syntax tree, a fifth of the time, holds it). Arguments are specialised by the same code as in a real
launch, so that launch finds its kernel. One that is still being compiled is waited for; one that nobody
played is compiled on the spot, and counted.

This rests on two things that Triton does not promise (3.6 and 3.9 have both): ``JITFunction.run`` with
``warmup``, and the hook of its own ``AsyncCompileMode``, of which this is another form: that one waits for
all kernels before any is launched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime.jit import JITFunction

log = logging.getLogger(__name__)
_CALM_THREADS = 2  # beside steps: each may hold the interpreter's lock for 5 ms


class Job:
    """A kernel that a thread compiles. Stands for it in Triton's cache until it is there."""

    def __init__(self, compile_: Callable[[], Any]) -> None:
        self._compile = compile_
        self._lock = threading.Lock()
        self._keeps: list[Callable[[Any], None]] = []
        self._kernel: Any = None
        self._error: Exception | None = None
        self.is_done = False

    def keep(self, keep: Callable[[Any], None]) -> None:
        """``keep`` puts into Triton's cache what it is given: this, or the kernel."""
        with self._lock:
            self._keeps.append(keep)
            keep(self._kernel if self._kernel is not None else self)

    def result(self) -> Any:
        """The kernel; compiled now, unless that is done. Raises what the compiler raised.

        Triton 3.6 calls this before it launches.
        """
        with self._lock:
            if not self.is_done:
                self._run()
        if self._error is not None:
            raise self._error
        return self._kernel

    def _run(self) -> None:
        try:
            self._kernel = self._compile()
        except Exception as error:
            self._error = error
        else:
            for keep in self._keeps:
                keep(self._kernel)
        self.is_done = True
        del self._compile

    def __getattr__(self, name: str) -> Any:
        """Triton 3.9 launches whatever is in its cache."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.result(), name)


class Compiling:
    """``Ops.compiling``. Owned by the thread that launches."""

    def __init__(self, threads: int) -> None:
        self._most = max(1, threads)
        self._jobs: dict[str, Job] = {}
        self._fresh: list[Job] = []
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running = 0
        self._num_done = 0
        self._is_playing = False
        self.num_late = 0  # kernels that no play asked for

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Launches of this thread only compile. Afterwards the threads have what is new.

        Raises ``ImportError`` with a Triton that has no such hook.
        """
        from triton.runtime import _async_compile

        original, owner = JITFunction.run, threading.get_ident()

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            is_ours = threading.get_ident() == owner
            return original(self, *args, grid=grid, warmup=warmup or is_ours, **options)

        # Stays: a launch of a kernel that is on its way must find it.
        _async_compile.active_mode.set(self)  # type: ignore[arg-type]
        JITFunction.run = run
        self._is_playing = True
        try:
            yield
        finally:
            self._is_playing = False
            JITFunction.run = original
            self._start_fresh()

    def submit(
        self, key: str, compile_: Callable[[], Any], keep: Callable[[Any], None], _cleanup: Any = None
    ) -> Any:
        """What Triton calls with a kernel that it does not have."""
        found = self._jobs.get(key)
        if found is None:
            found = self._jobs[key] = Job(compile_)
            if self._is_playing:
                self._fresh.append(found)
            else:
                self._compile_late(found)
        found.keep(keep)
        return found if self._is_playing else found.result()

    def _compile_late(self, job: Job) -> None:
        self.num_late += 1
        start = time.perf_counter()
        name = job.result().metadata.name
        log.debug("%s was compiled when it was needed: %.2f s", name, time.perf_counter() - start)

    @property
    def num_kernels(self) -> int:
        """So far, those that are compiled and those that will be."""
        return len(self._jobs) - self.num_late

    def wait(self, count: int, report: Callable[[int, int], None]) -> None:
        """Until the first ``count`` kernels are there; ``report`` is called with how many are, and of how
        many. A kernel that does not compile raises where it is launched."""
        with self._changed:
            while self._num_done < count:
                report(self._num_done, count)
                self._changed.wait(0.1)
        report(count, count)

    def calm_down(self) -> None:
        """Few threads from now on: steps run beside them."""
        self._most = min(self._most, _CALM_THREADS)

    def _start_fresh(self) -> None:
        with self._changed:
            self._queue.extend(self._fresh)
            self._fresh.clear()
            missing = min(self._most, len(self._queue) + self._running) - self._running
            self._running += max(0, missing)
        for _ in range(missing):
            # A daemon: nobody waits for kernels that were not needed when the process ends.
            threading.Thread(target=self._work, name="compile", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue or self._running > self._most:
                    self._running -= 1
                    return
                job = self._queue.popleft()
            try:
                job.result()
            except Exception:
                log.debug("a kernel does not compile; its launch will say why", exc_info=True)
            with self._changed:
                self._num_done += 1
                self._changed.notify_all()
