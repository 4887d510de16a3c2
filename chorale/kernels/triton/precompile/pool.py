"""CompilePool: processes that compile kernels for the engine, started before torch is imported.

This side imports neither torch nor Triton. One child imports the kernels and forks the others
(``worker_main.py``). Each takes one task at a time over a separate socket, and ends when the socket is
closed: by ``close``, or because this process has ended.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import queue
import subprocess
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from chorale.machine.processes import module_command

logger = logging.getLogger(__name__)
MAX_SIZE = 12
_TIMEOUT = 120.0  # seconds for one kernel
MANIFESTS = hashlib.sha256(b"chorale: compile manifests").hexdigest()  # used instead of a kernel's hash
_MODULE = "chorale.kernels.triton.precompile.worker_main"


class CompilePool:
    """Thread-safe. The caller compiles kernels that a process cannot compile."""

    def __init__(self, size: int) -> None:
        """Start ``size`` processes. Raises ``OSError`` if no process can be started."""
        pairs = [Pipe() for _ in range(size)]
        theirs = [other.fileno() for _, other in pairs]
        # The processes see no GPU: their contexts would take memory from the engine's budget.
        environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                [*module_command(_MODULE), *map(str, theirs)],
                env=os.environ | environment,
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        finally:
            for _, other in pairs:
                other.close()
        self.size = size
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for ours, _ in pairs:
            self._free.put(ours)
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, task: bytes) -> bool:
        """Let one process do ``task``, and wait. Returns False if no process was free or the task failed."""
        try:
            process = self._free.get_nowait()
        except queue.Empty:
            return False
        try:
            process.send_bytes(task)
            if not process.poll(_TIMEOUT):
                raise TimeoutError("no answer")
            error = process.recv_bytes()
        except (OSError, EOFError) as lost:
            process.close()
            logger.debug("a compile process was lost: %r", lost)
            return False
        self._give_back(process)
        if error:
            logger.debug("a process could not compile: %s", error.decode("utf-8", "replace"))
        return not error

    def _give_back(self, process: Connection) -> None:
        with self._lock:
            if self._is_closed:
                process.close()
            else:
                self._free.put(process)

    def close(self) -> None:
        """Let each process finish its task, then exit. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(queue.Empty):
                while True:
                    self._free.get_nowait().close()
        threading.Thread(target=self._process.wait, name="compile-pool", daemon=True).start()  # reaps it

    def join(self) -> None:
        """Close, and wait until all processes have ended."""
        self.close()
        self._process.wait()


def start(cores: int) -> CompilePool | None:
    """Start a pool on a machine with ``cores`` cores. Returns None with one core, or if no process can
    start."""
    size = min(cores - 1, MAX_SIZE)
    if size < 1 or not hasattr(os, "fork"):
        return None
    try:
        return CompilePool(size)
    except OSError as error:
        logger.debug("kernels are compiled in threads: %s", error)
        return None


def cache_exists() -> bool:
    """Returns whether Triton's cache has any manifest; then a pool is probably not needed."""
    # Triton's name for the folder of a hash.
    folder = base64.b32encode(bytes.fromhex(MANIFESTS)).decode().rstrip("=")
    try:
        return any((cache_folder() / folder).glob("*.json"))
    except OSError:
        return False


def cache_folder() -> Path:
    """Return the folder of Triton's disk cache."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))
