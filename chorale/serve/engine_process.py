"""The engine process: build the engine, then receive, step, deliver, until told to stop.

Started by the supervisor as ``python -m chorale.serve.engine_process``, with an ``EngineStart`` on stdin.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from chorale.client.base import Core, EngineInfo
from chorale.client.wire import Abort, Bye, Submit, ToEngine
from chorale.config import EngineConfig
from chorale.engine.types import GenerateRequest
from chorale.errors import ChoraleError, ConfigError
from chorale.kernels.triton.precompile import pool
from chorale.processes import settle_signals
from chorale.runtime.hardware import cpu_count
from chorale.serve.bootstrap import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STEP,
    EngineStart,
    Failure,
    calm_collector,
    check_directory,
    configure_logging,
    read_start,
    write_failure,
)
from chorale.serve.engine_socket import Mailbox
from chorale.serve.heartbeat import Heart

log = logging.getLogger(__name__)
_NVIDIA = "/dev/nvidiactl"  # there is a driver, and so perhaps a GPU
QUIET = 1.0  # seconds without work after which a client in a tight loop of requests is not in sight
IDLE_WAIT = 0.5  # seconds; how often an idle engine looks for clients that vanished


class Progress(Protocol):
    """``fraction`` is 0..1 within the phase, or None when it cannot be told."""

    def __call__(self, phase: str, fraction: float | None = None, message: str = "") -> None: ...


Build = Callable[[EngineConfig, Progress], tuple[Core, EngineInfo]]


class EngineLoop:
    """The one loop of the process. Between two steps it reads everything that arrived."""

    def __init__(self, core: Core, mailbox: Mailbox, heart: Heart, engine_id: str) -> None:
        self._core, self._mailbox, self._heart, self._engine_id = core, mailbox, heart, engine_id
        self._draining = False
        self._worked_at = time.monotonic()

    def drain(self) -> None:
        """Stop as soon as there is no work left."""
        self._draining = True
        self._heart.draining()

    def run(self) -> None:
        """Returns when drained. Raises whatever a step raised."""
        core, mailbox, heart = self._core, self._mailbox, self._heart
        while core.has_work or not self._draining:
            if not core.has_work:
                self._rest()
            for client, message in mailbox.receive():
                self._handle(client, message)
            mailbox.drop_silent()
            if core.has_work:
                self._worked_at = time.monotonic()
                heart.step_begins()
                chunks = core.step()
                heart.step_ends()
                heart.stats = stats = core.stats()
                if chunks:
                    mailbox.deliver(chunks, stats)

    def _rest(self) -> None:
        """Wait for messages. When there was no work for a while, let the engine prepare a little instead."""
        is_quiet = time.monotonic() - self._worked_at >= QUIET
        self._mailbox.wait(0 if is_quiet and self._core.use_idle_time() else IDLE_WAIT)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._core.abort(request_id)
        self._heart.stats = self._core.stats()

    def _handle(self, client: bytes, message: ToEngine) -> None:
        if isinstance(message, Submit):
            if message.engine_id == self._engine_id:  # else meant for an engine that has died
                self._submit(client, message.request)
        elif isinstance(message, Abort):
            self._abort(client, message)
        elif isinstance(message, Bye):
            self._mailbox.drop(client)

    def _abort(self, client: bytes, message: Abort) -> None:
        mailbox = self._mailbox
        if message.index is None:
            self.abort([i for i in message.request_ids if mailbox.disown(client, i)])
            return
        for request_id in message.request_ids:  # still owned: the other choices go on
            if mailbox.owns(client, request_id):
                self._core.abort(request_id, message.index)

    def _submit(self, client: bytes, request: GenerateRequest) -> None:
        mailbox, stats = self._mailbox, self._heart.stats
        if not mailbox.own(client, request.request_id, request.sampling.n):
            mailbox.refuse(client, request, "the request id is already in use", stats)
            return
        try:
            self._core.add_request(request)
        except (ChoraleError, ValueError) as error:
            # The engine never takes what it cannot run; the fault is this request's alone.
            mailbox.disown(client, request.request_id)
            mailbox.refuse(client, request, str(error), stats)


def run_engine_process(start: EngineStart, build: Build) -> int:
    """Load with ``build``, serve until SIGTERM, return the exit code. Runs in the process's main thread."""
    configure_logging(start.log_level, "engine")
    # SIGUSR1: the supervisor asks a hung engine where it is. A terminal's signals are the supervisor's.
    settle_signals((signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
    check_directory(start.directory)
    engine_id = uuid.uuid4().hex[:16]
    heart = Heart(start.directory, engine_id, start.beat_interval, start.parent_pid)
    heart.start()
    try:
        core, info = build(start.config, heart.loading)
    except Exception as error:
        heart.stop()
        return _start_failed(start, error)
    calm_collector()
    return _serve(start, core, info, heart, engine_id)


def _start_failed(start: EngineStart, error: Exception) -> int:
    deterministic = isinstance(error, ConfigError)
    if deterministic:
        message = str(error)
    else:
        log.exception("the engine could not start")
        message = f"{type(error).__name__}: {error}"
    write_failure(start.directory, Failure(message, deterministic))
    return EXIT_CONFIG if deterministic else EXIT_FAILED


def _serve(start: EngineStart, core: Core, info: EngineInfo, heart: Heart, engine_id: str) -> int:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    mailbox = Mailbox(
        start.directory,
        engine_id,
        client_timeout=start.client_timeout,
        on_orphans=lambda request_ids: loop.abort(request_ids),
        wake_fd=reader.fileno(),
    )
    loop = EngineLoop(core, mailbox, heart, engine_id)
    signal.signal(signal.SIGTERM, lambda *_: loop.drain())
    heart.stats = core.stats()
    heart.ready(msgspec.structs.replace(info, engine_id=engine_id, pid=os.getpid()))
    try:
        loop.run()
    except Exception as error:
        log.exception("a step failed: the engine process ends")
        message = f"the engine failed ({type(error).__name__})"
        write_failure(start.directory, Failure(f"{message}: {error}", deterministic=False))
        mailbox.last_words(message)
        return EXIT_STEP
    finally:
        mailbox.close()
        heart.stop()
        signal.set_wakeup_fd(-1)
        reader.close()
        writer.close()
    return EXIT_OK


def open_cuda() -> None:
    """Start the driver and the context that torch will use, while torch is imported. Best effort."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # no NVIDIA GPU
    context = ctypes.c_void_p()
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)  # never released: torch's life is ours


def main() -> int:
    start = read_start(sys.stdin.buffer, EngineStart)
    compile_pool = None
    if start.config.device != "cpu":
        compile_pool = early_pool(start.config)
        threading.Thread(target=open_cuda, name="cuda", daemon=True).start()
    from chorale.serve.build import build_engine  # imports torch: only here, never in the HTTP process

    return run_engine_process(start, partial(build_engine, pool=compile_pool))


def early_pool(config: EngineConfig) -> pool.CompilePool | None:
    """Compile processes, if kernels will probably have to be compiled: they import while this one does."""
    has_triton = config.ops != "reference" and importlib.util.find_spec("triton") is not None
    if not config.precompile_kernels or not has_triton or not os.path.exists(_NVIDIA) or pool.cache_exists():
        return None
    return pool.start(cpu_count())


if __name__ == "__main__":
    sys.exit(main())
