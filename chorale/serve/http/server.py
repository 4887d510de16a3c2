"""Runs an app as a listening server and shuts it down gracefully.

On SIGTERM (or another of ``stop_signals``): /ready returns 503 (``Lifecycle.draining``) while requests are
accepted for ``drain_grace`` more seconds; then the listener closes; running requests get ``shutdown_timeout``
seconds; then the engine's client is closed, which ends each remaining stream with an error event; two seconds
later the connections are closed. A second signal skips the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import uvicorn
from starlette.types import ASGIApp

from chorale.api.http.request_limits import LocalHosts, is_loopback
from chorale.api.listening import BACKLOG, Stop, bind_sockets, stop_signals
from chorale.config.engine import ServerConfig
from chorale.serve.http.protocol import limited_protocol
from chorale.serve.http.tls import check_tls

if TYPE_CHECKING:
    from chorale.api.http.middleware import HttpMiddleware

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 60
_GRACE_SECONDS = 5.0
_CUT_SECONDS = 2.0  # time to write the terminal events of cancelled streams
_TICK_SECONDS = 1.0  # between two dates of answers
_LOOK_SECONDS = 0.01  # between two looks at the connections of a server that ends


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handling, which ``stop_signals`` replaces.

    uvicorn's own looks ten times a second whether it should end, and then waits 0.1 s for connections.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Closes the listener and idle connections; ``serve`` returns once the others have ended."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # sets the date of the headers
            await _wait(self._ending, _TICK_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        state, asked = self.server_state, set[object]()
        # One look at least: what was accepted just before the listener closed becomes a connection after it.
        while not self.force_exit:
            for connection in state.connections - asked:
                connection.shutdown()
                asked.add(connection)
            await asyncio.sleep(_LOOK_SECONDS)
            if not state.connections and not state.tasks:
                return
        # The servers' ``wait_closed`` would wait for these without end (asyncio's, from Python 3.12 on).
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # then they have heard of it


def _uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    password_env = config.ssl_keyfile_password_env
    return uvicorn.Config(
        app,
        http=limited_protocol(config),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_keyfile_password=os.environ.get(password_env) if password_env else None,
    )


def _local_only(app: HttpMiddleware, config: ServerConfig) -> ASGIApp:
    """Adds the check of Host names to a server without keys that only this machine can reach."""
    behind_proxy = bool(config.root_path) or bool(config.allowed_origins)
    if config.uds is None and is_loopback(config.host) and not app.has_keys and not behind_proxy:
        return LocalHosts(app, config.host)
    return app


class Service(Protocol):
    """Work beside the requests of a server process."""

    @property
    def num_running(self) -> int:
        """Returns how many pieces of work ``drain`` would wait for."""
        ...

    async def run(self) -> None:
        """Runs until it is cancelled."""
        ...

    def leave(self) -> None:
        """Begins nothing that another process can do."""
        ...

    async def drain(self) -> None:
        """Waits until what is running has ended."""
        ...

    async def put_back(self) -> None:
        """Leaves what another process can go on with to others. Never raises."""
        ...

    async def close(self) -> None:
        """Ends everything. Never raises."""
        ...


async def serve_app(
    app: HttpMiddleware,
    config: ServerConfig,
    services: Sequence[Service] = (),
    sockets: Sequence[socket.socket] | None = None,
    on_ready: Callable[[], None] | None = None,
    *,
    stop: Stop | None = None,
    drain_grace: float | None = None,
) -> None:
    """Serves until a signal (or ``stop``), then drains.

    ``on_ready`` is called once connections are accepted. ``drain_grace`` None: 5 s if a load balancer may be
    in front, 0 on a loopback address or a unix socket.
    """
    stop = stop or Stop()
    check_tls(config)
    made = _uvicorn_config(_local_only(app, config), config)
    server = _Server(made)
    listening = list(sockets) if sockets is not None else bind_sockets(config)
    if drain_grace is None:
        drain_grace = 0.0 if config.uds is not None or is_loopback(config.host) else _GRACE_SECONDS
    timeout = config.shutdown_timeout
    with _signals(stop):
        async with _running(services):
            serving = asyncio.create_task(server.serve(sockets=listening))
            helpers = [
                asyncio.create_task(_announce(server, on_ready)),
                asyncio.create_task(_drain(app, server, services, timeout, drain_grace, stop)),
            ]
            try:
                await serving
                await _finish(services, timeout, stop)
            finally:
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)
    # Otherwise other processes use it, and the supervisor removes it.
    if config.api_server_count == 1:
        _remove_socket(config)


@contextlib.asynccontextmanager
async def listening(
    app: ASGIApp, config: ServerConfig, sockets: Sequence[socket.socket]
) -> AsyncIterator[None]:
    """Serves an app beside the work of the body, without drain or signals."""
    server = _Server(_uvicorn_config(app, config))
    serving = asyncio.create_task(server.serve(sockets=list(sockets)))
    try:
        yield
    finally:
        server.force_exit = True
        server.end()
        await asyncio.gather(serving, return_exceptions=True)


@contextlib.asynccontextmanager
async def attended(app: HttpMiddleware, services: Sequence[Service]) -> AsyncIterator[None]:
    """Serves the app under another program's HTTP server, which listens, drains and stops."""
    async with _running(services):
        try:
            yield
        finally:
            app.state.lifecycle.draining = True


@contextlib.asynccontextmanager
async def _running(services: Sequence[Service]) -> AsyncIterator[None]:
    """Runs the services beside the body, and closes them at its end."""
    with _quick_switching():
        tasks = [asyncio.create_task(service.run()) for service in services]
        try:
            yield
        finally:
            for service in services:
                await service.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _remove_socket(config: ServerConfig) -> None:
    if config.uds is not None:
        Path(config.uds).unlink(missing_ok=True)


async def _announce(server: uvicorn.Server, on_ready: Callable[[], None] | None) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    if on_ready is not None:
        on_ready()


async def _drain(
    app: HttpMiddleware,
    server: _Server,
    services: Sequence[Service],
    timeout: float,
    grace: float,
    stop: Stop,
) -> None:
    await stop.asked.wait()
    app.state.lifecycle.draining = True
    for service in services:
        service.leave()
    if app.state.lifecycle.num_requests:
        logger.info("draining: %d requests are running", app.state.lifecycle.num_requests)
    await _wait(stop.hurry, grace)
    server.end()
    await _wait(stop.hurry, timeout)
    if app.state.lifecycle.num_requests:
        logger.warning("cancelling %d requests", app.state.lifecycle.num_requests)
    for service in services:
        await service.put_back()
    await app.state.client.close()  # ends every stream with an error event
    await asyncio.sleep(_CUT_SECONDS)
    server.force_exit = True


async def _finish(services: Sequence[Service], timeout: float, stop: Stop) -> None:
    """Waits for the work of the services, as long as for requests with a connection."""
    num_running = sum(service.num_running for service in services)
    if not num_running:
        return
    logger.info("draining: %d background responses and batches are running", num_running)
    draining = asyncio.gather(*(service.drain() for service in services))
    hurry = asyncio.create_task(stop.hurry.wait())
    await asyncio.wait((draining, hurry), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    hurry.cancel()
    await asyncio.gather(draining, hurry, return_exceptions=True)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


@contextlib.contextmanager
def _quick_switching() -> Iterator[None]:
    """Sets the thread switch interval to 1 ms while serving.

    With the default of 5 ms, a thread that parses a large body would slow all streams to 200 events a second.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def _signals(stop: Stop) -> Iterator[None]:
    """Connects ``stop_signals`` to ``stop``. Only the main thread can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    names = stop_signals()
    for name in names:
        loop.add_signal_handler(name, stop)
    try:
        yield
    finally:
        for name in names:
            loop.remove_signal_handler(name)
