"""The engine process: builds the engine, then runs the engine loop until it is stopped.

Started by the supervisor as ``python -m chorale.serve.engine.process``, with an ``EngineStart`` on stdin.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import gc
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
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from chorale.client.base import EngineInfo
from chorale.client.wire.messages import (
    Abort,
    CheckGrammar,
    Control,
    FollowBlocks,
    Submit,
    ToEngine,
    Unregister,
)
from chorale.config.engine import EngineConfig
from chorale.engine.commands import Outcome
from chorale.engine.kv_cache.index_log import net_changes
from chorale.engine.pending_grammars import PATIENCE
from chorale.engine.types import EngineStats, GenerateRequest
from chorale.errors import ChoraleError, ConfigError, GpuError
from chorale.kernels.triton.precompile import pool
from chorale.machine.hardware import cpu_count
from chorale.machine.processes import collect_rarely, end, settle_signals, tune_garbage_collector
from chorale.runtime.progress import Progress
from chorale.serve.bootstrap import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    EngineStart,
    Failure,
    check_directory,
    read_start,
    write_failure,
)
from chorale.serve.engine.heartbeat import HeartbeatThread
from chorale.serve.engine.intent import Intent
from chorale.serve.engine.kv_events.publisher import KvEventPublisher, open_kv_events
from chorale.serve.engine.socket import EngineServerSocket
from chorale.serve.logs import configure_logging

if TYPE_CHECKING:
    from chorale.engine.core import EngineCore

logger = logging.getLogger(__name__)
_NVIDIA = "/dev/nvidiactl"  # exists if an NVIDIA driver is loaded
_QUIET = 1.0  # seconds without work after which the engine uses its idle time
_IDLE_WAIT = 0.5  # most seconds of waiting for a message while there is no work


Build = Callable[[EngineConfig, Progress], "tuple[EngineCore, EngineInfo]"]


class EngineLoop:
    """The engine loop: receives messages, runs a step and delivers its tokens, again and again."""

    def __init__(
        self,
        start: EngineStart,
        core: EngineCore,
        heartbeat: HeartbeatThread,
        publisher: KvEventPublisher | None,
        wake_fd: int,
    ) -> None:
        """``wake_fd`` becomes readable when a signal arrives."""
        self._core, self._heartbeat, self._publisher = core, heartbeat, publisher
        self._engine_id = heartbeat.engine_id
        self.server_socket = EngineServerSocket(
            start.directory,
            self._engine_id,
            client_timeout=start.client_timeout,
            on_orphans=self._abort_all,
            wake_fd=wake_fd,
            tcp=start.tcp.engine if start.tcp is not None else None,
        )
        self._draining = False
        self._checks: dict[Future[str | None], tuple[bytes, int]] = {}  # grammar checks in progress
        self._intent = Intent(start.directory)
        self._commands: dict[Future[Outcome], tuple[bytes, Control]] = {}  # commands in progress

    def drain(self) -> None:
        """End the loop once all work is done."""
        self._draining = True
        self._heartbeat.draining()

    def run(self) -> None:
        """Run until drained. Raises any error of a step.

        After ``_QUIET`` seconds without work, the engine uses its idle time between looks for messages.
        """
        core, worked_at = self._core, time.monotonic()
        while self._receive():
            if core.has_work:
                worked_at = time.monotonic()
                self._step()
            else:
                is_quiet = time.monotonic() - worked_at >= _QUIET
                self._wait(0 if is_quiet and core.use_idle_time() else _IDLE_WAIT)

    def _receive(self) -> bool:
        """Handles every message that has arrived. Returns False once drained."""
        for client, message in self.server_socket.receive():
            self._handle(client, message)
        for verdict in [verdict for verdict in self._checks if verdict.done()]:
            self.server_socket.answer_check(*self._checks.pop(verdict), verdict.result())
        self._answer_commands()
        self.server_socket.expire_silent_clients()
        if not self._core.has_work:
            self._report_index(self._heartbeat.stats)  # aborts and refusals may have changed it
        return self._core.has_work or not self._draining

    def _wait(self, timeout: float) -> None:
        """Blocks until a message arrives, for at most ``timeout`` seconds."""
        if self._checks:
            concurrent.futures.wait(self._checks, PATIENCE, concurrent.futures.FIRST_COMPLETED)
        else:
            self.server_socket.wait(timeout)

    def _step(self) -> None:
        self._heartbeat.step_begins()
        chunks = self._core.step()
        self._heartbeat.step_ends()
        stats = self._core.stats()
        self._report_index(stats)
        self._heartbeat.stats = stats
        if chunks:
            self.server_socket.deliver(chunks, stats)

    def _report_index(self, stats: EngineStats) -> None:
        """Send subscribers and followers the changes of the prefix index since the last call."""
        publisher, events = self._publisher, self._core.index_log.take()
        if publisher is not None:
            publisher.publish(events)
            stats.kv_event_batches, stats.kv_event_batches_dropped = (
                publisher.num_batches,
                publisher.num_dropped,
            )
        if self.server_socket.has_followers:
            self.server_socket.update_followers(net_changes(events), stats)
        else:
            self._core.log_index(publisher is not None)

    def _abort_all(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._core.abort(request_id)
        self._heartbeat.stats = self._core.stats()

    def _handle(self, client: bytes, message: ToEngine) -> None:
        if isinstance(message, Submit):
            if message.engine_id == self._engine_id:  # not meant for an earlier engine
                self._submit(client, message.request)
        elif isinstance(message, Abort):
            self._abort(client, message)
        elif isinstance(message, FollowBlocks):
            self._core.log_index()
            self.server_socket.follow(client, self._core.prefix_index(), self._core.stats())
        elif isinstance(message, CheckGrammar):
            self._checks[self._core.check_grammar(message.grammar)] = client, message.number
        elif isinstance(message, Control):
            if message.engine_id == self._engine_id:
                self._control(client, message)
        elif isinstance(message, Unregister):
            self.server_socket.drop(client)

    def _abort(self, client: bytes, message: Abort) -> None:
        for request_id in message.request_ids:
            if self.server_socket.owns(client, request_id):
                self._core.abort(request_id, message.index)
        self._heartbeat.stats = self._core.stats()

    def _control(self, client: bytes, message: Control) -> None:
        command, intent = message.command, self._intent
        if command.action != "state":
            self._heartbeat.announce(command.action)
        before = intent.read()
        if command.action in ("pause", "sleep"):
            intent.write(command)
        future = self._core.control(command)
        if future.done():
            if future.exception() is not None:
                intent.write(before)
            elif not future.result().is_paused:
                intent.write(None)
        self._commands[future] = client, message

    def _answer_commands(self) -> None:
        """Answer the commands that are done, after the chunks of the step that finished them."""
        done = [future for future in self._commands if future.done()]
        if not done:
            return
        self._heartbeat.stats = stats = self._core.stats()
        for future in done:
            client, message = self._commands.pop(future)
            if future.exception() is None:
                self._intent.note(message.command)
            self.server_socket.answer_command(client, message.number, future, stats)
        if not self._commands:
            self._heartbeat.announce("")

    def _submit(self, client: bytes, request: GenerateRequest) -> None:
        server_socket, stats = self.server_socket, self._heartbeat.stats
        server_socket.received_from(client)
        if refusal := self._core.refusal:
            server_socket.refuse_for_now(client, request.request_id, refusal)
            return
        if not server_socket.own(client, request.request_id, request.sampling.n):
            server_socket.refuse(client, request, "the request id is already in use", stats)
            return
        try:
            self._core.add_request(request)
            if not self._core.has_work:  # it is held back: no step will report it
                self._heartbeat.stats = self._core.stats()
        except (ChoraleError, ValueError) as error:
            # The engine is unaffected: it checks a request before accepting it.
            server_socket.disown(request.request_id)
            server_socket.refuse(client, request, str(error), stats)


def run_engine_process(start: EngineStart, build: Build) -> int:
    """Builds the engine, serves until SIGTERM, and returns the exit code. Call in the main thread."""
    configure_logging(start.log, start.name)
    # SIGUSR1 makes a hung engine dump its stacks. The supervisor handles signals from the terminal.
    settle_signals((signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
    check_directory(start.directory)
    heartbeat = HeartbeatThread(start, engine_id=uuid.uuid4().hex[:16])
    heartbeat.start()
    publisher = None
    try:
        # Open the sockets before loading: a port in use fails early, and subscribers can already connect.
        publisher = open_kv_events(start.config.kv_events_config, start.replica)
        core, info = build(start.config, heartbeat.loading)
        Intent(start.directory).take_up(core)
    except Exception as error:
        heartbeat.stop()
        if publisher is not None:
            publisher.close()
        return _start_failed(start, error)
    gc.collect()
    tune_garbage_collector()
    if publisher is not None:
        publisher.start(core)
    return _serve(start, core, info, heartbeat, publisher)


def _start_failed(start: EngineStart, error: Exception) -> int:
    deterministic = isinstance(error, ConfigError)
    if isinstance(error, ChoraleError):
        message = str(error)
    else:
        logger.exception("the engine could not start")
        message = f"{type(error).__name__}: {error}"
    write_failure(start.directory, Failure(message, deterministic, isinstance(error, GpuError)))
    return EXIT_CONFIG if deterministic else EXIT_FAILED


def _serve(
    start: EngineStart,
    core: EngineCore,
    info: EngineInfo,
    heartbeat: HeartbeatThread,
    publisher: KvEventPublisher | None,
) -> int:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    loop = EngineLoop(start, core, heartbeat, publisher, reader.fileno())
    signal.signal(signal.SIGTERM, lambda *_: loop.drain())
    heartbeat.stats = core.stats()
    heartbeat.ready(msgspec.structs.replace(info, engine_id=heartbeat.engine_id, pid=os.getpid()))
    try:
        loop.run()
    except Exception as error:
        logger.exception("a step failed; the engine process ends")
        message = f"the engine failed ({type(error).__name__})"
        is_gpu = isinstance(error, GpuError)
        write_failure(start.directory, Failure(f"{message}: {error}", deterministic=False, is_gpu=is_gpu))
        loop.server_socket.announce_failure(message)
        return EXIT_FAILED
    finally:
        loop.server_socket.close()
        if publisher is not None:
            publisher.close()
        heartbeat.stop()
        signal.set_wakeup_fd(-1)
        reader.close()
        writer.close()
    return EXIT_OK


def open_cuda() -> None:
    """Initialises the driver and the CUDA context for torch while torch is being imported. Best effort."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # no NVIDIA GPU
    context = ctypes.c_void_p()
    if driver.cuInit(0) == 0:
        # The context is never released: torch uses it until this process ends.
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)


def main() -> int:
    collect_rarely()
    start = read_start(sys.stdin.buffer, EngineStart)
    compile_pool = None
    if start.config.device != "cpu":
        compile_pool = early_pool(start.config)
        threading.Thread(target=open_cuda, name="cuda", daemon=True).start()
    from chorale.serve.engine.build import build_engine  # imports torch, so never in the HTTP process

    build = partial(
        build_engine,
        pool=compile_pool,
        prefix_secret=start.prefix_secret,
        on_lost=partial(end_without_rank, start.directory),
    )
    return run_engine_process(start, build)


def end_without_rank(directory: str, error: ChoraleError) -> None:
    """Ends this process after a rank was lost, because the main thread would wait for that rank forever."""
    message = f"the engine failed: {error.message}"
    write_failure(directory, Failure(message, deterministic=False, is_gpu=isinstance(error, GpuError)))
    os._exit(EXIT_FAILED)


def early_pool(config: EngineConfig) -> pool.CompilePool | None:
    """Starts compile processes early, so that their imports run concurrently, if they are probably needed."""
    has_triton = config.ops != "reference" and importlib.util.find_spec("triton") is not None
    if not config.precompile_kernels or not has_triton or not os.path.exists(_NVIDIA) or pool.cache_exists():
        return None
    return pool.start(cpu_count())


if __name__ == "__main__":
    end(main())
