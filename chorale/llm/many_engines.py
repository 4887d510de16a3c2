"""ManyEngines: several engine processes behind ``LLM``, with the methods of ``OfflineEngine``.

The server's monitors start and restart the processes. The server's fleet sends each request to the engine
where it costs least, and continues it on another engine if that one dies. A thread of this module runs the
event loop, reads the tokens, and stops the engines when it ends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import random
import threading
from collections.abc import Iterable, Sequence

from chorale.client.base import EngineInfo, EngineView
from chorale.client.fleet.fixed_members import FixedFleet
from chorale.client.remote import ClientLimits
from chorale.client.stream import RequestStream
from chorale.config.engine import EngineConfig, ServerConfig
from chorale.engine.commands import Command, Outcome
from chorale.engine.types import EngineStats, GenerateRequest
from chorale.errors import ConfigError, EngineDeadError
from chorale.llm.engine import Take
from chorale.machine.processes import quiet_collector
from chorale.serve.bootstrap import EngineStart, configured_secret, make_directory, replicate
from chorale.serve.engine_monitor import EngineMonitor
from chorale.serve.logs import LogOptions
from chorale.serve.run_engines import run_engines

_QUEUED = 2**40  # limit of queued requests, high enough for all prompts of a call
_LOOK_SECONDS = 0.02  # between two checks whether the engines are ready
_SUBMITTED = 64  # requests that are submitted before the event loop does other work


class ManyEngines:
    """Engine processes that serve one call of ``run`` at a time, like ``OfflineEngine``."""

    def __init__(self, config: EngineConfig, count: int) -> None:
        """Wait until all engines are ready. Raises ``ConfigError`` or ``EngineDeadError`` if one fails."""
        self._config, self._count = config, count
        self._lock = threading.Lock()  # held by the thread that runs requests
        self._owner: int | None = None
        self._is_closed = False
        self._error: BaseException | None = None
        self._call: _Call | None = None
        self._open = threading.Event()
        self._thread = threading.Thread(target=self._main, name="chorale-engines", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._open.wait()
            if self._error is not None:
                raise self._error
            self._wait_ready()
            self.info: EngineInfo = self._client.info
        except BaseException:
            self.close()
            raise

    @property
    def engines(self) -> Sequence[EngineView]:
        return self._client.engines

    @property
    def stats(self) -> EngineStats:
        return self._client.stats

    def control(self, command: Command) -> Outcome:
        """Execute a command on all engines between two calls of ``run``; see ``EngineClient.control``."""
        self._refuse_owner("the engines cannot be controlled from within a call that is still running")
        with self._lock:
            self._wait_ready()
            return asyncio.run_coroutine_threadsafe(self._client.control(command), self._loop).result()

    def run(self, requests: Iterable[GenerateRequest], take: Take) -> None:
        """Run ``requests`` until all of them have ended; see ``OfflineEngine.run``. ``take`` is called in
        another thread.

        If an engine dies, another one continues its requests. Raises ``EngineDeadError`` if that one dies,
        too, or if no engine is left.
        """
        self._refuse_owner("LLM was called again from within a call that is still running")
        with self._lock:
            self._wait_ready()
            self._owner = threading.get_ident()
            self._call = call = _Call(self._client, take)
            try:
                self._loop.call_soon_threadsafe(call.start, requests)
                with quiet_collector():
                    call.ended.wait()
            finally:
                if not call.ended.is_set():  # a signal handler has raised
                    self._loop.call_soon_threadsafe(call.stop)
                    call.ended.wait()
                self._call = self._owner = None
        if call.error is not None:
            raise call.error

    def require_ready(self) -> None:
        """Raises ``EngineDeadError`` if an engine will not be restarted, or all were shut down."""
        if self._is_closed:
            raise EngineDeadError("the engine was shut down")
        for index, monitor in enumerate(self._monitors):
            if monitor.failure is not None:
                raise EngineDeadError(f"engine {index}: {monitor.failure.message}")

    def close(self) -> None:
        """Stop the engines; requests that run in another thread fail. Idempotent."""
        self._refuse_owner("LLM cannot be shut down from within a call that is still running")
        atexit.unregister(self.close)
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(RuntimeError, AttributeError):  # the loop has ended or never started
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    # ------------------------------------------------------------------ the calling thread

    def _refuse_owner(self, message: str) -> None:
        """Raises ``RuntimeError`` in a callback of the running call and in a signal handler of its thread."""
        if threading.get_ident() in (self._owner, self._thread.ident):
            raise RuntimeError(message)

    def _wait_ready(self) -> None:
        """Wait until every engine is ready, at the start or after a restart."""
        while True:
            if not self._is_closed:
                for index, monitor in enumerate(self._monitors):
                    failure = monitor.failure
                    if failure is not None and failure.deterministic:
                        raise ConfigError(f"engine {index}: {failure.message}")
            self.require_ready()
            if all(each.status.state == "ready" for each in self._client.engines):
                return
            threading.Event().wait(_LOOK_SECONDS)

    # ------------------------------------------------------------------ the thread of the event loop

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._open.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        with make_directory() as directory:
            start = EngineStart(
                directory=str(directory),
                config=self._config,
                parent_pid=os.getpid(),
                prefix_secret=configured_secret(self._config, os.environ),
                log=LogOptions("warning"),
            )
            starts = replicate(start, self._count)
            self._monitors = tuple(EngineMonitor(each) for each in starts)
            self._client = FixedFleet(
                [each.directory for each in starts],
                queue=ServerConfig(max_queued_requests=_QUEUED),
                limits=ClientLimits(slow_reader_patience=float("inf")),
                patience=None,
                # Seeds are drawn in the order of prompts, as in a single engine.
                seeds=random.Random(self._config.seed),
            )
            self._client.start()
            running = asyncio.ensure_future(run_engines(self._monitors, starts))
            self._open.set()
            try:
                await self._stop.wait()
            finally:
                if self._call is not None:
                    self._call.stop(EngineDeadError("the engine was shut down"))
                    if self._call.task is not None:
                        await asyncio.wait([self._call.task])
                await self._client.close()
                for monitor in self._monitors:
                    monitor.stop()
                await running


class _Call:
    """One call of ``ManyEngines.run``. On the event loop, a task per request reads the request's stream."""

    def __init__(self, client: FixedFleet, take: Take) -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None  # exception that ended the call early
        self._client, self._take = client, take
        self._streams: dict[str, RequestStream] = {}
        self.task: asyncio.Task[None] | None = None

    def start(self, requests: Iterable[GenerateRequest]) -> None:
        if self.error is not None:  # the engines were shut down meanwhile
            self.ended.set()
            return
        self.task = asyncio.get_running_loop().create_task(self._run(requests))
        self.task.add_done_callback(self._finish)

    def stop(self, error: BaseException | None = None) -> None:
        """Abort the requests in flight."""
        self.error = self.error or error
        if self.task is not None:
            self.task.cancel()

    def _finish(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self.error = self.error or error
        self.ended.set()

    async def _run(self, requests: Iterable[GenerateRequest]) -> None:
        async with asyncio.TaskGroup() as self._readers:
            for number, request in enumerate(requests, 1):
                self._send(request)
                if number % _SUBMITTED == 0:
                    await asyncio.sleep(0)

    def _send(self, request: GenerateRequest) -> None:
        stream = self._streams[request.request_id] = self._client.submit(request)
        self._readers.create_task(self._read(request.request_id, stream))

    async def _read(self, request_id: str, stream: RequestStream) -> None:
        try:
            async for chunks in stream:
                for order in self._take(chunks):
                    if isinstance(order, GenerateRequest):
                        self._send(order)
                    else:
                        self._streams[order[0]].drop(order[1])
        except (KeyboardInterrupt, SystemExit) as error:  # else it ends the event loop
            self.stop(error)
        finally:
            await stream.aclose()
            del self._streams[request_id]
