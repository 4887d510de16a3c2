"""ReplicaEngine: several engine processes behind ``LLM``, with the methods of ``OfflineEngine``.

They are the server's: its monitors start and restart them, and its client sends each request where it costs
least. A thread of this module runs their event loop, and ends them when it ends; the calling thread reads the
tokens.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import random
import threading
from collections.abc import Iterable

import msgspec

from chorale.client.base import EngineInfo
from chorale.client.remote import ClientLimits
from chorale.client.replicas import ReplicaClient
from chorale.client.stream import RequestStream
from chorale.config.engine import EngineConfig
from chorale.engine.types import SEED_BITS, EngineStats, GenerateRequest, TokenChunk
from chorale.errors import ConfigError, EngineDeadError
from chorale.llm.engine import Take
from chorale.machine.processes import quiet_collector
from chorale.serve.bootstrap import EngineStart, configured_secret, make_directory, replicate
from chorale.serve.engine_monitor import EngineMonitor
from chorale.serve.logs import LogOptions

_QUEUED = 2**40  # requests that may wait: all prompts of a call do
_LOOK_SECONDS = 0.02

# What the readers pass on: a request's chunks, its end, or why it failed.
_Arrived = queue.SimpleQueue[list[TokenChunk] | None | BaseException]


class ReplicaEngine:
    """One call of ``run`` at a time, as of ``OfflineEngine``."""

    def __init__(self, config: EngineConfig, count: int) -> None:
        """Returns once all engines are ready. Raises ``ConfigError`` or ``EngineDeadError`` if one is not."""
        self._config, self._count = config, count
        self._random = random.Random(config.seed)  # seeds are drawn as by one engine, in the order of prompts
        self._lock = threading.Lock()  # held by the thread that runs requests
        self._owner: int | None = None
        self._is_closed = False
        self._error: BaseException | None = None
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._streams: dict[str, RequestStream] = {}
        self._open = threading.Event()
        self._thread = threading.Thread(target=self._main, name="chorale-replicas", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._open.wait()
            self._raise_error()
            self._wait_ready()
            self.info: EngineInfo = self._client.info
        except BaseException:
            self.close()
            raise

    def stats(self) -> EngineStats:
        return self._client.stats

    def run(self, requests: Iterable[GenerateRequest], take: Take) -> None:
        """Run ``requests`` until all of them have ended; see ``OfflineEngine.run``.

        An engine that dies ends the call with ``EngineDeadError``; it is started again for the next one.
        """
        if self._owner == threading.get_ident():
            raise RuntimeError("LLM was called again from within a call that is still running")
        with self._lock:
            self._wait_ready()
            self._owner = threading.get_ident()
            try:
                with quiet_collector():
                    self._run(requests, take)
            finally:
                self._owner = None

    def require_ready(self) -> None:
        """Raises ``EngineDeadError`` if an engine was given up or all were shut down."""
        if self._is_closed:
            raise EngineDeadError("the engine was shut down")
        for index, monitor in enumerate(self._monitors):
            if monitor.failure is not None:
                raise EngineDeadError(f"engine {index}: {monitor.failure.message}")

    def close(self) -> None:
        """End the engines; requests that run in another thread fail. Idempotent."""
        if self._owner == threading.get_ident():
            raise RuntimeError("LLM cannot be shut down from within a call that is still running")
        atexit.unregister(self.close)
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(RuntimeError, AttributeError):  # the loop has ended, or never began
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    # ------------------------------------------------------------------ the calling thread

    def _wait_ready(self) -> None:
        """Wait until every engine is ready: at the start, and after a death."""
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

    def _run(self, requests: Iterable[GenerateRequest], take: Take) -> None:
        arrived: _Arrived = queue.SimpleQueue()
        num_left = 0
        try:
            for request in requests:
                self._send(request, arrived)
                num_left += 1
            while num_left:
                chunks, num_ended = _read(arrived)
                num_left -= num_ended
                for order in take(chunks):
                    if isinstance(order, GenerateRequest):
                        self._send(order, arrived)
                        num_left += 1
                    else:
                        self._loop.call_soon_threadsafe(self._drop, *order)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                asyncio.run_coroutine_threadsafe(self._abandon(), self._loop).result()
            raise

    def _send(self, request: GenerateRequest, arrived: _Arrived) -> None:
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._random.getrandbits(SEED_BITS))
            request = msgspec.structs.replace(request, sampling=sampling)
        self._loop.call_soon_threadsafe(self._start_reader, request, arrived)

    # ------------------------------------------------------------------ the thread of the event loop

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._open.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

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
            limits = ClientLimits(slow_reader_patience=float("inf"))
            self._client = ReplicaClient(
                [each.directory for each in starts], max_queued_requests=_QUEUED, limits=limits
            )
            self._client.start()
            running = [asyncio.ensure_future(monitor.run()) for monitor in self._monitors]
            self._open.set()
            try:
                await self._stop.wait()
            finally:
                await self._client.close()
                await asyncio.gather(*self._readers.values())
                for monitor in self._monitors:
                    monitor.stop()
                await asyncio.gather(*running)

    def _start_reader(self, request: GenerateRequest, arrived: _Arrived) -> None:
        self._readers[request.request_id] = asyncio.ensure_future(self._read_stream(request, arrived))

    async def _read_stream(self, request: GenerateRequest, arrived: _Arrived) -> None:
        try:
            stream = self._client.submit(request)
            self._streams[request.request_id] = stream
            async for chunks in stream:
                arrived.put(chunks)
            arrived.put(None)
        except Exception as error:
            arrived.put(error)
        finally:
            self._streams.pop(request.request_id, None)
            self._readers.pop(request.request_id, None)

    def _drop(self, request_id: str, index: int) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.drop(index)

    async def _abandon(self) -> None:
        """Abort the requests in flight and wait for their readers."""
        readers = list(self._readers.items())
        for request_id, _ in readers:
            self._client.abort(request_id)
        await asyncio.gather(*(reader for _, reader in readers))


def _read(arrived: _Arrived) -> tuple[list[TokenChunk], int]:
    """Wait for what arrives next. Returns it with all that is there, and how many requests have ended."""
    chunks: list[TokenChunk] = []
    num_ended = 0
    item = arrived.get()
    while True:
        if isinstance(item, BaseException):
            raise EngineDeadError(str(item)) from item
        if item is None:
            num_ended += 1
        else:
            chunks += item
        try:
            item = arrived.get_nowait()
        except queue.Empty:
            return chunks, num_ended
