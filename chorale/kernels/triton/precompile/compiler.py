"""Compiling before launching: steps are played without their kernels, which threads compile meanwhile.

Triton compiles a kernel when it is first launched, in the launching thread. While ``Compiling.playing`` is
in force, launches of its thread end where a kernel would go to the device: what is not in memory becomes a
job for threads. Arguments are specialised by the same code as in a real launch, so that launch finds its
kernel. One that is still being compiled is waited for; one that nobody played is compiled on the spot, and
counted.

With a crew, a thread has one of its processes compile into Triton's disk cache, and then reads it from there
by the very call that would have compiled it: whatever goes wrong on the way, that call does the work.
Without, threads compile (passes and ptxas run without the interpreter's lock, which the rest fights for): so
they begin when there is nothing left to play, and stop when the first kernels are there, until steps run.

This rests on three things that Triton does not promise (3.6 and 3.9 have them): ``JITFunction.run`` with
``warmup``, the hook of its own ``AsyncCompileMode``, of which this is another form (that one waits for all
kernels before any is launched), and, with a crew, the names of what the hook's function has closed over.
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

from chorale.kernels.triton.precompile.manifest import Marker, is_cached
from chorale.kernels.triton.precompile.pool import Crew
from chorale.kernels.triton.precompile.worker_main import describe, prepare_launcher, settle_keys

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
    """``Ops.compiler``. Owned by the thread that launches."""

    def __init__(self, threads: int, crew: Callable[[], Crew | None] = lambda: None) -> None:
        """``crew``: hires what compiles in place of threads, which then only wait for it."""
        self._hire, self._threads = crew, max(1, threads)
        self._crew: Crew | None = None
        self._most = 0  # threads that may run now
        self._is_calm = self._is_whole = self._is_known = self._is_playing = False
        self._marker: Marker | None = None
        self._jobs: dict[str, Job] = {}
        self._fresh: list[Job] = []
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running = 0
        self._num_done = 0
        self._kernels: set[tuple[str, str]] = set()  # those done, as ``Marker`` wants them
        self._num_failed = 0
        self.num_late = 0  # kernels that no play asked for
        self.num_here = 0  # kernels that the crew was to compile, and this process did
        self._keys = threading.Thread(target=settle_keys, name="kernel-keys", daemon=True)
        self._keys.start()

    def is_known(self, facts: str) -> bool:
        """Whether an earlier start that ``facts`` describe has left all its kernels on disk. Then nothing
        need be played. Else that will be remembered, once all that was played has been compiled.
        """
        self._keys.join()
        self._marker = Marker(facts)
        self._is_known = self._marker.is_valid()
        if self._is_known:
            _hook(self)
        return self._is_known

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Launches of this thread only compile. Afterwards the crew has what is new; threads have it once
        they are waited for.

        Raises ``ImportError`` with a Triton that has no such hook.
        """
        original, owner = JITFunction.run, threading.get_ident()

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            is_ours = threading.get_ident() == owner
            return original(self, *args, grid=grid, warmup=warmup or is_ours, **options)

        _hook(self)  # stays: a launch of a kernel that is on its way must find it
        self._hire_crew()
        self._keys.join()
        JITFunction.run = run
        self._is_playing = True
        try:
            yield
        finally:
            self._is_playing = False
            JITFunction.run = original
            with self._changed:
                self._queue.extend(self._fresh)
                self._fresh.clear()
            self._start()

    def _hire_crew(self) -> None:
        if self._crew is None:
            self._crew, self._hire = self._hire(), lambda: None
            if self._crew is not None:
                self._most = self._threads = self._crew.size

    def submit(
        self, key: str, compile_: Callable[[], Any], keep: Callable[[Any], None], _cleanup: Any = None
    ) -> Any:
        """What Triton calls with a kernel that it does not have."""
        found = self._jobs.get(key)
        if found is None:
            apart = compile_ if self._crew is None or not self._is_playing else self._apart(key, compile_)
            found = self._jobs[key] = Job(apart)
            if self._is_playing:
                self._fresh.append(found)
            else:
                self._compile_late(found, key, compile_)
        found.keep(keep)
        return found if self._is_playing else found.result()

    def _apart(self, key: str, compile_: Callable[[], Any]) -> Callable[[], Any]:
        """``compile_``, after a process of the crew has left on disk what it looks for."""

        def compile_after() -> Any:
            try:
                is_there = self._is_left_on_disk(key, _arguments(compile_))
            except Exception:  # not told as we know it
                is_there = False
                log.debug("a kernel cannot be given away", exc_info=True)
            if not is_there:
                with self._changed:
                    self.num_here += 1
            return compile_()

        return compile_after

    def _is_left_on_disk(self, key: str, told: dict[str, Any]) -> bool:
        source = told["src"]
        if is_cached(key, source.name):
            return True
        task = describe(source, told["target"], told["options"].__dict__, told["env_vars"])
        is_done = self._crew is not None and self._crew.run(task)
        if is_done and is_cached(key, source.name):
            return True
        log.debug("%s is compiled here: %s", source.name, "not found" if is_done else "nobody did")
        return False

    def _compile_late(self, job: Job, key: str, compile_: Callable[[], Any]) -> None:
        if self._is_known and is_cached(key, _arguments(compile_)["src"].name):
            return
        self.num_late += 1
        start = time.perf_counter()
        name = job.result().metadata.name
        log.debug("%s was compiled when it was needed: %.2f s", name, time.perf_counter() - start)

    @property
    def num_kernels(self) -> int:
        """So far, those that are compiled and those that will be."""
        return len(self._jobs) - self.num_late

    @property
    def is_busy(self) -> bool:
        with self._changed:
            return bool(self._queue or self._running)

    def wait(self, count: int, report: Callable[[int, int], None]) -> None:
        """Until the first ``count`` kernels are there; ``report`` is called with how many are, and of how
        many. A kernel that does not compile raises where it is launched. Everything has been played."""
        self._is_whole = True
        self._allow(_CALM_THREADS if self._is_calm else self._threads)
        with self._changed:
            while self._num_done < count:
                report(self._num_done, count)
                self._changed.wait(0.1)
        if self._crew is None and not self._is_calm:
            self._allow(0)
        report(count, count)
        self._end()

    def calm_down(self) -> None:
        """Few threads from now on: steps run beside them."""
        self._is_calm = True
        self._allow(min(self._threads, _CALM_THREADS))
        self._end()

    def _allow(self, most: int) -> None:
        with self._changed:
            self._most = most
        self._start()

    def _start(self) -> None:
        with self._changed:
            missing = max(0, min(self._most - self._running, len(self._queue)))
            self._running += missing
        for _ in range(missing):
            # A daemon: nobody waits for kernels that were not needed when the process ends.
            threading.Thread(target=self._work, name="compile", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue or self._running > self._most:
                    self._running -= 1
                    break
                job = self._queue.popleft()
            self._do(job)
        self._end()

    def _do(self, job: Job) -> None:
        kernel = None
        try:
            kernel = job.result()
            prepare_launcher(kernel)
        except Exception:
            log.debug("a kernel does not compile; its launch will say why", exc_info=True)
        with self._changed:
            self._num_done += 1
            if kernel is None:
                self._num_failed += 1
            else:
                self._kernels.add((kernel.hash, kernel.src.name))
            self._changed.notify_all()

    def _end(self) -> None:
        """If all is done, for ever: the crew goes, and what is on disk is written down."""
        with self._changed:
            if self._queue or self._running or not (self._is_whole or self._is_calm):
                return
            crew, self._crew = self._crew, None
            marker, self._marker = self._marker, None
        if crew is not None:
            crew.dismiss()
        if marker is not None and self._is_whole and not self._num_failed and not self._is_known:
            try:
                marker.write(self._kernels)
            except (OSError, RuntimeError) as error:
                log.debug("the next start will look for its kernels again: %s", error)


def _hook(compiling: Compiling) -> None:
    from triton.runtime import _async_compile

    _async_compile.active_mode.set(compiling)  # type: ignore[arg-type]


def _arguments(compile_: Callable[[], Any]) -> dict[str, Any]:
    """Of ``triton.compile``, from Triton's function that will call it. Raises ``AttributeError``, ..."""
    cells: Any = compile_.__closure__  # type: ignore[attr-defined]
    names = compile_.__code__.co_freevars  # type: ignore[attr-defined]
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
