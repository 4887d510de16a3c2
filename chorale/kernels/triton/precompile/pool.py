"""Processes that compile kernels beside the engine: spawned early, and import while torch is imported.

This side imports neither torch nor Triton. One child process imports the kernels and forks the others
(``worker_main.py``); each takes one task at a time over a socket of its own, and ends when the socket is
closed, by ``dismiss`` or by the end of this process.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import queue
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

log = logging.getLogger(__name__)
MOST = 12
_PATIENCE = 120.0  # seconds for one kernel; a process that is silent for so long is given up
MARKERS = hashlib.sha256(b"chorale: starts whose kernels are all here").hexdigest()  # as if a kernel's hash
_MODULE = "chorale.kernels.triton.precompile.worker_main"


class Crew:
    """Thread-safe. What a process cannot do is left to the caller."""

    def __init__(self, size: int) -> None:
        """Spawns; raises ``OSError`` if that cannot be."""
        pairs = [Pipe() for _ in range(size)]
        theirs = [other.fileno() for _, other in pairs]
        # No GPU is visible to them: a context each would take memory that the engine has planned with.
        alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", _MODULE, *map(str, theirs)]
        try:
            self._process = subprocess.Popen(
                command,
                env=os.environ | alone,
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
        self._is_dismissed = False

    def run(self, task: bytes) -> bool:
        """Have one process do ``task``, and wait. False: nobody was free, or it was not done."""
        try:
            process = self._free.get_nowait()
        except queue.Empty:
            return False
        try:
            process.send_bytes(task)
            if not process.poll(_PATIENCE):
                raise TimeoutError("no answer")
            complaint = process.recv_bytes()
        except (OSError, EOFError) as error:
            process.close()
            log.debug("a process that compiles was lost: %r", error)
            return False
        self._give_back(process)
        if complaint:
            log.debug("a process could not compile: %s", complaint.decode("utf-8", "replace"))
        return not complaint

    def _give_back(self, process: Connection) -> None:
        with self._lock:
            if self._is_dismissed:
                process.close()
            else:
                self._free.put(process)

    def dismiss(self) -> None:
        """They end, as soon as they have done what they do. May be called again."""
        with self._lock:
            if self._is_dismissed:
                return
            self._is_dismissed = True
            with contextlib.suppress(queue.Empty):
                while True:
                    self._free.get_nowait().close()
        # Reaped by a thread, which ends when they have.
        threading.Thread(target=self._process.wait, name="crew", daemon=True).start()


def hire(cores: int) -> Crew | None:
    """Processes for a machine of so many cores; None where they would not help, or cannot be spawned."""
    size = min(cores - 1, MOST)
    if size < 1 or not hasattr(os, "fork"):
        return None
    try:
        return Crew(size)
    except OSError as error:
        log.debug("kernels are compiled in threads: %s", error)
        return None


def was_here() -> bool:
    """Whether some start has left its mark in Triton's cache, so that probably nobody is needed. A guess."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    cache = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    # How Triton's cache names a folder.
    folder = base64.b32encode(bytes.fromhex(MARKERS)).decode().rstrip("=")
    try:
        return any(Path(cache, folder).glob("*.json"))
    except OSError:
        return False
