"""The HTTP side of the supervisor: a server or a job in its process, or several processes on one socket."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import socket
import time
from asyncio.subprocess import Process
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import msgspec

from chorale.api.listening import Stop
from chorale.client.fleet.fixed_members import FixedFleet
from chorale.client.remote import RemoteClient
from chorale.errors import ChoraleError, ConfigError, EngineLoadingError
from chorale.machine.processes import LOADING_TIMEOUT, Silence, module_command
from chorale.machine.tasks import end_tasks
from chorale.serve.bootstrap import EXIT_CONFIG, ApiStart
from chorale.serve.engine_monitor import WATCH_INTERVAL, end, spawn
from chorale.serve.watch import RestartPolicy, WatchLimits

if TYPE_CHECKING:
    from chorale.api.http.middleware import HttpMiddleware

logger = logging.getLogger(__name__)
AnyClient = RemoteClient | FixedFleet
API_COMMAND = module_command("chorale.serve.http.api_process")
SETTLED = 10.0  # seconds of running after which an API process counts as ready
_POLL_SECONDS = 0.05  # interval of checking whether the engine is ready for a job
CUT_GRACE = 5.0  # seconds in which an API process must cancel running requests


class HttpFrontend:
    """The HTTP side. ``run`` serves until it is drained, and raises an exception if it fails."""

    async def run(self) -> None:
        raise NotImplementedError

    def drain(self) -> None:
        """First call: lets running requests finish. Second call: cancels them."""

    def fail(self, message: str) -> None:
        """Tells clients that no engine will be started again, unless they notice it themselves."""


class InProcessFrontend(HttpFrontend):
    """The HTTP server on the supervisor's event loop. ``stop``, which the supervisor calls, drains it."""

    def __init__(self, start: ApiStart, sockets: list[socket.socket], stop: Stop) -> None:
        self._start, self._sockets, self._stop = start, sockets, stop
        self._client: AnyClient | None = None

    async def run(self) -> None:
        # Imported late, so that the engine process starts first.
        http = await asyncio.to_thread(importlib.import_module, "chorale.serve.http.app")
        self._client = client = http.make_client(self._start)
        client.start()
        try:
            await self._serve(http, client)
        finally:
            await client.close()

    async def _serve(self, http: ModuleType, client: AnyClient) -> None:
        """``http``: the module ``serve.http.app``."""
        await http.serve_http(client, self._start, self._sockets, self._stop)

    def fail(self, message: str) -> None:
        if self._client is not None:
            self._client.mark_failed(message)


class Job(Protocol):
    """Work with the app. ``run`` is called once the engine is ready; when it returns, the engine ends."""

    async def run(self, app: HttpMiddleware) -> None: ...

    def stop(self) -> None:
        """First call: lets running requests finish. Second call: cancels them."""
        ...


class JobFrontend(InProcessFrontend):
    """Runs a job that calls the app, instead of an HTTP server."""

    def __init__(self, start: ApiStart, stop: Stop, job: Job) -> None:
        super().__init__(start, [], stop)
        self._job, self._draining = job, False

    async def _serve(self, http: ModuleType, client: AnyClient) -> None:
        server = await asyncio.to_thread(importlib.import_module, "chorale.serve.http.server")
        async with (
            http.opened_app(client, self._start) as (app, services),
            server.attended(app, services),
        ):
            if await self._ready(client):
                await self._job.run(app)

    async def run(self) -> None:
        await super().run()
        self._stop()

    async def _ready(self, client: AnyClient) -> bool:
        """Waits for the engine. Returns False if the job has to stop before it is ready."""
        while not self._draining:
            try:
                _ = client.info
                return True
            except EngineLoadingError:
                await asyncio.sleep(_POLL_SECONDS)
        return False

    def drain(self) -> None:
        self._draining = True
        self._job.stop()


class MultiProcessFrontend(HttpFrontend):
    """Several API processes, each connected to the engine. One that exits or hangs is restarted."""

    def __init__(self, start: ApiStart, *, limits: WatchLimits) -> None:
        self._start = start
        self._restart_policy = RestartPolicy(limits)
        self._num_drains = 0
        self._processes: dict[int, Process] = {}

    async def run(self) -> None:
        count = self._start.server.api_server_count
        workers = [asyncio.ensure_future(self._keep(index)) for index in range(count)]
        try:
            await asyncio.gather(*workers)
        finally:
            await end_tasks(*workers)
            await asyncio.gather(*(end(process, CUT_GRACE) for process in self._processes.values()))

    async def _keep(self, index: int) -> None:
        while not self._num_drains:
            started = time.monotonic()
            code, hung = await self._run_once(index)
            if self._num_drains:
                return
            if code == EXIT_CONFIG:  # the process has logged the reason
                raise ConfigError("an API process cannot run with this configuration")
            now = time.monotonic()
            delay = self._restart_policy.add(now, was_ready=now - started > SETTLED, is_hang=hung)
            if delay is None:
                raise ChoraleError("the API processes crashed too often")
            await asyncio.sleep(delay)

    async def _run_once(self, index: int) -> tuple[int, bool]:
        """Runs one process. Returns its exit code, and whether it was killed because it hung."""
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        try:
            start = msgspec.structs.replace(self._start, process=index, beats=theirs)
            process = await spawn(API_COMMAND, start, pass_fds=(*start.socket_fds, theirs))
            self._processes[index] = process
            if self._num_drains:  # drained while the process was being started
                self._terminate(process)
            watching = asyncio.ensure_future(self._kill_if_it_hangs(process, ours))
            try:
                code = await process.wait()
            finally:
                watching.cancel()
            del self._processes[index]
            if not self._num_drains:
                logger.error("API process %d ended with code %d", process.pid, code)
            return code, watching.done()
        finally:
            os.close(ours)
            os.close(theirs)

    async def _kill_if_it_hangs(self, process: Process, beats: int) -> None:
        timeout = self._start.heartbeat_timeout * self._restart_policy.growth(time.monotonic())
        silence, limit = Silence(process.pid, time.monotonic()), LOADING_TIMEOUT
        while not silence.exceeds(time.monotonic(), limit):
            await asyncio.sleep(WATCH_INTERVAL)
            with contextlib.suppress(BlockingIOError):
                os.read(beats, 4096)
                silence.hear(time.monotonic())
                limit = timeout
        logger.error("API process %d hangs (silent for %.1f s): killing it", process.pid, silence.seconds)
        process.kill()

    def drain(self) -> None:
        self._num_drains += 1
        for process in self._processes.values():
            self._terminate(process)

    @staticmethod
    def _terminate(process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()


def make_frontend(
    start: ApiStart, sockets: list[socket.socket], limits: WatchLimits, stop: Stop
) -> HttpFrontend:
    if start.server.api_server_count == 1:
        return InProcessFrontend(start, sockets, stop)
    return MultiProcessFrontend(start, limits=limits)


def share(sockets: list[socket.socket]) -> tuple[int, ...]:
    """Makes the sockets inheritable and returns their descriptors."""
    for listener in sockets:
        os.set_inheritable(listener.fileno(), True)
    return tuple(listener.fileno() for listener in sockets)
