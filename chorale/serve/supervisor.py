"""The supervisor: the process that the operator starts. It starts the engine and the HTTP processes.

    supervisor ──spawns──► engine processes        (watched by their heartbeats, restarted with back-off)
        └─ HTTP server in this process, or ──spawns──► N API processes on one listening socket

``run`` is called by the command line and returns the process's exit code: 0 after a drain, 1 when it gave up,
2 when the configuration cannot run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from chorale.api.listening import Stop, bind_sockets, stop_signals
from chorale.client.base import EngineInfo, EngineStatus
from chorale.client.summary import merge_info
from chorale.config.engine import EngineConfig, ServerConfig
from chorale.errors import ChoraleError, ConfigError
from chorale.machine.processes import settle_signals
from chorale.machine.tasks import end_tasks
from chorale.serve.bootstrap import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    ApiStart,
    EngineStart,
    configured_secret,
    loop_factory,
    make_directory,
    replicate,
)
from chorale.serve.engine_monitor import ENGINE_COMMAND, EngineMonitor, OnStatus
from chorale.serve.http.frontend import CUT_GRACE, Job, JobFrontend, make_frontend, share
from chorale.serve.logs import LogOptions, share_lock
from chorale.serve.run_engines import run_engines
from chorale.serve.watch import WatchLimits

logger = logging.getLogger(__name__)
LOG_LOCK = "log.lock"
FAILURE_SHOWN = 0.5  # seconds for which clients can still read the error after the engine has failed
DRAIN_SLACK = 10.0  # extra seconds for load balancers and the terminal events of streams
ENGINE_STOP_SLACK = 2.0  # extra seconds after the kill grace of the engine


class Observer:
    """Hears of the progress of a run, on the event loop: its methods must not block."""

    def on_listening(self, sockets: list[socket.socket]) -> None:
        """Called once, unless the server runs a job."""

    def on_status(self, status: EngineStatus, info: EngineInfo | None) -> None:
        """Called with the progress of loading, with "ready" and the ``EngineInfo``, after crashes, and with
        "failed" and the message for the operator."""

    def on_stopping(self) -> None:
        """Called when the drain begins."""


def run(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    observer: Observer,
    *,
    api_key_hashes: Sequence[bytes] = (),
    limits: WatchLimits | None = None,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    job: Job | None = None,
) -> int:
    """Serves until a stop signal or a failure, and returns the exit code. Call in the main thread.

    With ``job``, nothing listens: the job calls the app in this process, and the engines end with it.

    ``api_key_hashes``: ``hash_key`` of each key; child processes never get the keys. Raises ``ConfigError``
    if the address is in use or invalid.
    """
    settle_signals()
    sockets = bind_sockets(server_config) if job is None else []
    try:
        with make_directory() as directory:
            share_lock(str(directory / LOG_LOCK))
            engines, api = _starts(directory, engine_config, server_config, sockets, api_key_hashes)
            watch = limits or WatchLimits()
            supervisor = Supervisor(engines, api, sockets, observer, watch, engine_command, job)
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                return runner.run(supervisor.run())
    finally:
        for listener in sockets:
            listener.close()
        if server_config.uds is not None:
            Path(server_config.uds).unlink(missing_ok=True)


def _starts(
    directory: Path,
    engine: EngineConfig,
    server: ServerConfig,
    sockets: list[socket.socket],
    api_key_hashes: Sequence[bytes],
) -> tuple[tuple[EngineStart, ...], ApiStart]:
    parent = os.getpid()
    log = LogOptions.of(server, str(directory / LOG_LOCK))
    start = EngineStart(
        directory=str(directory),
        config=engine,
        parent_pid=parent,
        prefix_secret=configured_secret(engine, os.environ),
        log=log,
    )
    engines = replicate(start, server.data_parallel_size)
    return engines, ApiStart(
        directory=str(directory),
        server=server,
        model=engine.model,
        engine_directories=tuple(each.directory for each in engines) if len(engines) > 1 else (),
        seed=engine.seed,
        api_key_hashes=tuple(api_key_hashes),
        socket_fds=share(sockets) if server.api_server_count > 1 else (),
        parent_pid=parent,
        heartbeat_timeout=2 * engine.heartbeat_timeout,
        log=log,
    )


class Supervisor:
    """One run of the server. ``run`` starts the engines and the HTTP side, and always ends both."""

    def __init__(
        self,
        engines: Sequence[EngineStart],
        api: ApiStart,
        sockets: list[socket.socket],
        observer: Observer,
        limits: WatchLimits,
        engine_command: Sequence[str],
        job: Job | None,
    ) -> None:
        self._api, self._sockets = api, sockets
        self._observer, self._limits = observer, limits
        self._stop = Stop()
        self._frontend = (
            make_frontend(api, sockets, limits, self._stop)
            if job is None
            else JobFrontend(api, self._stop, job)
        )
        self._engines = tuple(engines)
        statuses = ReplicaStatuses(len(engines), observer.on_status)
        self._monitors = tuple(
            EngineMonitor(start, command=engine_command, limits=limits, on_status=statuses.callback(index))
            for index, start in enumerate(engines)
        )

    async def run(self) -> int:
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        engine = asyncio.ensure_future(run_engines(self._monitors, self._engines))
        frontend = asyncio.ensure_future(self._frontend.run())
        stopped = asyncio.ensure_future(self._stop.asked.wait())
        if self._sockets:
            self._observer.on_listening(self._sockets)
        try:
            await asyncio.wait([engine, frontend, stopped], return_when=asyncio.FIRST_COMPLETED)
            code = await self._verdict(engine, frontend)
            await self._drain(frontend)
            for monitor in self._monitors:
                monitor.stop()
            await asyncio.wait([engine], timeout=self._limits.kill_grace + ENGINE_STOP_SLACK)
        finally:
            await end_tasks(stopped, frontend, engine)
        return code

    async def _verdict(self, engine: asyncio.Task[int], frontend: asyncio.Task[None]) -> int:
        """Returns the exit code, which depends on which task has ended first."""
        if self._stop.asked.is_set():
            return EXIT_OK
        if not engine.done():
            error = frontend.exception()
            # The message of a ChoraleError needs no traceback.
            said = error is None or isinstance(error, ChoraleError)
            logger.error(
                "the HTTP side ended%s", f": {error}" if error else "", exc_info=None if said else error
            )
            return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
        error = engine.exception()
        if error is not None:
            logger.error("the engine monitor failed", exc_info=error)
        failure = next((each.failure for each in self._monitors if each.failure is not None), None)
        self._frontend.fail(failure.message if failure is not None else "the engine failed")
        await asyncio.sleep(FAILURE_SHOWN)
        self._stop()
        self._stop()  # without an engine, no running request can finish
        return EXIT_FAILED if error is not None else engine.result()

    async def _drain(self, frontend: asyncio.Task[None]) -> None:
        """Lets running requests finish within ``shutdown_timeout`` seconds; a second signal cancels them."""
        self._observer.on_stopping()
        self._frontend.drain()
        hurry = asyncio.ensure_future(self._stop.hurry.wait())
        timeout = self._api.server.shutdown_timeout + DRAIN_SLACK
        await asyncio.wait([frontend, hurry], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not frontend.done():
            self._frontend.drain()
            await asyncio.wait([frontend], timeout=CUT_GRACE)


class ReplicaStatuses:
    """Combines the statuses of all engines into one status for the command line.

    It reports "loading" from the first engine that is still loading, "ready" once each engine is
    ready or has failed, "dead" with the index of an engine that dies, and "failed" once all have failed.
    """

    def __init__(self, num_replicas: int, on_status: OnStatus) -> None:
        self._on_status = on_status
        self._statuses = [EngineStatus("loading")] * num_replicas
        self._infos: list[EngineInfo | None] = [None] * num_replicas
        self._was_ready = False

    def callback(self, index: int) -> OnStatus:
        """Returns the callback of a monitor. With one engine it is that of the command line."""
        if len(self._statuses) == 1:
            return self._on_status
        return partial(self._changed, index)

    def _changed(self, index: int, status: EngineStatus, info: EngineInfo | None) -> None:
        before, self._statuses[index] = self._statuses[index], status
        self._infos[index] = info if info is not None else self._infos[index]
        if status.state == "loading":
            self._loading(index, status)
        elif status.state in ("dead", "failed"):
            self._lost(index, status)
        elif status.state == "ready" and before.state != "ready":
            self._ready()

    def _loading(self, index: int, status: EngineStatus) -> None:
        first = next(i for i, each in enumerate(self._statuses) if each.state == "loading")
        if index == first and not self._was_ready:
            self._on_status(status, None)

    def _lost(self, index: int, status: EngineStatus) -> None:
        if all(each.state == "failed" for each in self._statuses):
            self._on_status(status, None)
            return
        more = "; the other engines keep running" if status.state == "failed" else ""
        named = replace(status, state="dead", message=f"engine {index}: {status.message}{more}")
        self._on_status(named, None)
        if status.state == "failed" and not self._was_ready:
            self._ready()

    def _ready(self) -> None:
        serving = [i for i, each in enumerate(self._statuses) if each.state != "failed"]
        infos = [info for i in serving if (info := self._infos[i]) is not None]
        if infos and all(self._statuses[i].state == "ready" for i in serving):
            self._was_ready = True
            self._on_status(EngineStatus("ready"), merge_info(infos))
