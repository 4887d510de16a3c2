"""Compiles kernels before they are launched: a dry run records them, processes compile them.

Triton compiles a kernel when it is first launched, in the launching thread. Within ``Precompiler.recording``,
launches of its thread do not reach the device, and kernels that are not in memory are queued. Triton's code
specialises the arguments, so the later launch finds its kernel. A launch waits for a kernel that is being
compiled; it compiles (and counts) a kernel that was not recorded.

A thread lets a process of the pool compile into Triton's disk cache, then makes Triton's own call, which
reads the kernel from there. If the process fails, that call compiles.

``contract.py`` lists and checks the parts of Triton that this relies on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from chorale.kernels.triton.precompile.contract import compile_arguments
from chorale.kernels.triton.precompile.manifest import CompileManifest, is_cached
from chorale.kernels.triton.precompile.pool import CompilePool
from chorale.kernels.triton.precompile.target import links_without_driver
from chorale.kernels.triton.precompile.worker_main import describe, prepare_launcher, settle_keys

logger = logging.getLogger(__name__)
# Threads while steps run, because each may hold the interpreter's lock for 5 ms; and threads without
# processes.
FEW_THREADS = 2


class PendingKernel:
    """A kernel that is being compiled. Represents the kernel in Triton's cache until then."""

    def __init__(self, compile_: Callable[[], Any]) -> None:
        self._compile = compile_
        self._lock = threading.Lock()
        self._finalizers: list[Callable[[Any], None]] = []
        self._kernel: Any = None
        self._error: Exception | None = None
        self._is_done = False

    def add_finalizer(self, finalize: Callable[[Any], None]) -> None:
        """Call ``finalize``, which puts its argument into Triton's cache, with this object, and later with
        the kernel."""
        with self._lock:
            self._finalizers.append(finalize)
            finalize(self._kernel if self._kernel is not None else self)

    def result(self) -> Any:
        """Returns the kernel, compiled here if no thread has compiled it. Raises the compiler's exception.

        Triton 3.6 calls this before a launch.
        """
        with self._lock:
            if not self._is_done:
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
            for finalize in self._finalizers:
                finalize(self._kernel)
        self._is_done = True
        del self._compile

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the kernel: Triton 3.9 launches the object in its cache."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.result(), name)


class Precompiler:
    """``Ops.precompiler``. Used by the launching thread only."""

    def __init__(self, start_pool: Callable[[], CompilePool | None] = lambda: None) -> None:
        """``start_pool`` is called at the first recording. Without processes, two threads compile."""
        self._start_pool = start_pool
        self._pool: CompilePool | None = None
        self._limit = FEW_THREADS
        self._is_recording = self._is_complete = self._is_throttled = self._is_written = False
        self._manifest: CompileManifest | None = None
        self._kernels: dict[str, PendingKernel] = {}
        self._recorded: list[PendingKernel] = []
        self._queue: deque[PendingKernel] = deque()
        self._changed = threading.Condition()
        self._num_running = self._num_done = 0
        self.errors: list[str] = []  # errors of kernels that do not compile
        self._compiled: set[tuple[str, str]] = set()  # entries of the manifest
        self.num_late = 0  # kernels compiled at their launch, because no dry run had found them
        self.num_here = 0  # kernels compiled in this process because the pool failed
        self._keys = threading.Thread(target=settle_keys, name="kernel-keys", daemon=True)
        self._keys.start()

    def is_cached(self, facts: str, device: torch.device, roots: Sequence[Path]) -> bool:
        """Returns whether an earlier start has stored all kernels on disk. If not, this start records them.

        Kernels depend only on ``facts``, ``device`` and the sources under ``roots``.
        """
        self._keys.join()
        manifest = CompileManifest(facts, device, roots)
        if manifest.is_valid():
            return True
        self._manifest = manifest
        return False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Make launches of this thread record only. Afterwards the new kernels are compiled.

        The tensors that the kernels would have written are undefined.
        """
        original, owner = JITFunction.run, threading.get_ident()

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            is_ours = threading.get_ident() == owner
            return original(self, *args, grid=grid, warmup=warmup or is_ours, **options)

        _async_compile.active_mode.set(self)  # later launches use it too
        if self._pool is None:
            self._pool, self._start_pool = self._start_pool(), lambda: None
            self._limit = self._limit if self._pool is None else self._pool.size
        self._keys.join()
        JITFunction.run = run
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False
            JITFunction.run = original
            with self._changed:
                self._queue.extend(self._recorded)
                self._recorded.clear()
            self._start_threads()

    def submit(
        self, key: str, compile_: Callable[[], Any], finalize: Callable[[Any], None], _cleanup: Any = None
    ) -> Any:
        """Called by Triton for a kernel that is not in memory."""
        found = self._kernels.get(key)
        if found is None:
            found = PendingKernel(self._through_pool(key, compile_) if self._is_recording else compile_)
            self._kernels[key] = found
            if self._is_recording:
                self._recorded.append(found)
            else:
                self._compile_late(found)
        found.add_finalizer(finalize)
        return found if self._is_recording else found.result()

    def _compile_late(self, kernel: PendingKernel) -> None:
        self.num_late += 1
        start = time.perf_counter()
        name = kernel.result().metadata.name
        logger.debug("%s was compiled at its launch: %.2f s", name, time.perf_counter() - start)

    def _through_pool(self, key: str, compile_: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a function that lets a process put the kernel on disk, then calls ``compile_``."""

        def compile_after() -> Any:
            if self._pool is not None and not self._is_on_disk(self._pool, key, compile_):
                with self._changed:
                    self.num_here += 1
            return compile_()

        return compile_after

    def _is_on_disk(self, pool: CompilePool, key: str, compile_: Callable[[], Any]) -> bool:
        """Let a process compile unless the disk cache has the kernel. Returns whether it has the kernel
        now."""
        try:
            found = compile_arguments(compile_)
            name = found["src"].name
            if is_cached(key, name):
                return True
            task = describe(found["src"], found["target"], found["options"].__dict__, found["env_vars"])
        except Exception:
            logger.debug("a kernel cannot be sent to a process", exc_info=True)
            return False
        is_done = pool.run(task) and is_cached(key, name)
        if not is_done:
            logger.debug("%s is compiled here", name)
        return is_done

    @property
    def num_kernels(self) -> int:
        return len(self._kernels) - self.num_late

    @property
    def is_busy(self) -> bool:
        with self._changed:
            return bool(self._queue or self._num_running)

    def wait(self, count: int, report: Callable[[int, int], None]) -> None:
        """Wait for the first ``count`` kernels, after everything has been recorded.

        ``report`` is called with (finished kernels, ``count``). A kernel that does not compile raises at its
        launch.
        """
        self._is_complete = True
        with self._changed:
            while self._num_done < count:
                report(self._num_done, count)
                self._changed.wait(0.1)
        report(count, count)
        self._end_if_done()

    def finish(self) -> bool:
        """Wait until all recorded kernels are compiled. Returns whether the manifest was written."""
        with self._changed:
            self._changed.wait_for(lambda: self._manifest is None)
            return self._is_written

    def throttle(self) -> None:
        """Throttle the remaining compilation, so that it does not slow down serving."""
        self._is_throttled = True
        with self._changed:
            self._limit = min(self._limit, FEW_THREADS)
        self._end_if_done()

    def cancel(self) -> None:
        """Stop precompilation: from now on kernels compile at their first launch."""
        _async_compile.active_mode.set(None)
        with self._changed:
            self._queue.clear()
        self.throttle()

    def _start_threads(self) -> None:
        with self._changed:
            missing = max(0, min(self._limit - self._num_running, len(self._queue)))
            self._num_running += missing
        for _ in range(missing):
            # Daemon threads, so that the process can end without waiting for kernels.
            threading.Thread(target=self._work, name="compile", daemon=True).start()

    def _work(self) -> None:
        while (kernel := self._next()) is not None:
            self._compile(kernel)
        self._end_if_done()

    def _next(self) -> PendingKernel | None:
        """Returns the next kernel, or None if this thread must end."""
        with self._changed:
            if self._queue and self._num_running <= self._limit:
                return self._queue.popleft()
            self._num_running -= 1
            return None

    def _compile(self, pending: PendingKernel) -> None:
        found: tuple[str, str] | str
        try:
            kernel = pending.result()
            if self._pool is None or not links_without_driver():  # otherwise a process has done it
                prepare_launcher(kernel)
            found = kernel.hash, kernel.src.name
        except Exception as error:
            logger.debug("a kernel does not compile; its launch will raise the error", exc_info=True)
            found = f"{type(error).__name__}: {error}"
        with self._changed:
            self._num_done += 1
            if isinstance(found, str):
                self.errors.append(found)
            else:
                self._compiled.add(found)
            self._changed.notify_all()

    def _end_if_done(self) -> None:
        """Close the pool and write the manifest if nothing is left to record or compile."""
        with self._changed:
            if self._queue or self._num_running or not (self._is_complete or self._is_throttled):
                return
            pool, self._pool = self._pool, None
            manifest, self._manifest = self._manifest, None
            if manifest is not None and self._is_complete and not self.errors:
                try:
                    manifest.write(self._compiled)
                    self._is_written = True
                except (OSError, RuntimeError) as error:
                    logger.debug("the manifest was not written: %s", error)
            self._changed.notify_all()
        if pool is not None:
            pool.close()
