"""Runs an app as a listening server and shuts it down gracefully.

When it is asked to stop, /ready returns 503 (``Lifecycle.draining``), and requests are accepted for
``drain_grace`` more seconds. Then the listener closes, and running requests may continue for
``shutdown_timeout`` seconds. Then the engine client is closed, which ends each remaining stream with an error
event. Two seconds later, the connections are closed. A second call of ``stop`` skips the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from chorale.api.http.request_limits import LocalHosts, is_loopback
from chorale.api.listening import BACKLOG, Stop
from chorale.config.engine import ServerConfig
from chorale.jobs.leases import Service
from chorale.machine.processes import quick_switching
from chorale.machine.tasks import end_tasks
from chorale.serve.http.protocol import limited_protocol
from chorale.serve.http.tls import check_tls, refresh_tls

if TYPE_CHECKING:
    from chorale.api.http.middleware import HttpMiddleware

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 60
_GRACE_SECONDS = 5.0  # default ``drain_grace`` behind a load balancer
_CUT_SECONDS = 2.0  # time to write the terminal events of cancelled streams
_TICK_SECONDS = 1.0  # interval of updating the Date header
_POLL_SECONDS = 0.01  # interval of checking for open connections during shutdown


class _Server(uvicorn.Server):
    """A uvicorn server without signal handling; its process handles signals.

    It also ends sooner: uvicorn polls ``should_exit`` ten times a second, and connections every 0.1 s.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Closes the listener and idle connections. ``serve`` returns once the others have ended."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # updates the Date header
            await _wait(self._ending, _TICK_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        state, asked = self.server_state, set[object]()
        # Sleep at least once, until a socket accepted just before has become a connection.
        while not self.force_exit:
            for connection in state.connections - asked:
                connection.shutdown()
                asked.add(connection)
            await asyncio.sleep(_POLL_SECONDS)
            if not state.connections and not state.tasks:
                return
        # Otherwise ``wait_closed`` of asyncio's servers would wait forever for these (from Python 3.12 on).
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # lets the connections handle the abort


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
        ssl_ciphers=config.ssl_ciphers or "TLSv1",  # uvicorn's default
    )


def _local_only(app: HttpMiddleware, config: ServerConfig) -> ASGIApp:
    """Adds a check of the Host header if the server has no API keys and listens on a loopback address."""
    behind_proxy = bool(config.root_path) or bool(config.allowed_origins)
    if config.uds is None and is_loopback(config.host) and not app.state.has_keys and not behind_proxy:
        return LocalHosts(app, config.host)
    return app


async def serve_app(
    app: HttpMiddleware,
    config: ServerConfig,
    services: Sequence[Service],
    sockets: Sequence[socket.socket],
    stop: Stop,
    *,
    drain_grace: float | None = None,
) -> None:
    """Serves until ``stop``, then drains.

    ``drain_grace`` defaults to 0 on a loopback address or a unix socket, otherwise to 5 s, so that load
    balancers notice.
    """
    check_tls(config)
    made = _uvicorn_config(_local_only(app, config), config)
    made.load()
    server = _Server(made)
    if drain_grace is None:
        drain_grace = 0.0 if config.uds is not None or is_loopback(config.host) else _GRACE_SECONDS
    timeout = config.shutdown_timeout
    async with _running(services):
        serving = asyncio.create_task(server.serve(sockets=list(sockets)))
        helpers = [asyncio.create_task(_drain(app, server, services, timeout, drain_grace, stop))]
        if made.ssl is not None and config.enable_ssl_refresh:
            helpers.append(asyncio.create_task(refresh_tls(made.ssl, config)))
        try:
            await serving
            await _finish(services, timeout, stop)
        finally:
            await end_tasks(*helpers)


@contextlib.asynccontextmanager
async def listening(
    app: ASGIApp, config: ServerConfig, sockets: Sequence[socket.socket]
) -> AsyncIterator[None]:
    """Serves an app while the body runs, without drain or signals."""
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
    """Runs the services of an app that another program's HTTP server serves and drains."""
    async with _running(services):
        try:
            yield
        finally:
            app.state.lifecycle.draining = True


@contextlib.asynccontextmanager
async def _running(services: Sequence[Service]) -> AsyncIterator[None]:
    """Runs the services while the body runs, then closes them."""
    with quick_switching():
        tasks = [asyncio.create_task(service.run()) for service in services]
        try:
            yield
        finally:
            for service in services:
                await service.close()
            await end_tasks(*tasks)


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
    """Waits at most ``timeout`` seconds for the services to finish; less if ``stop.hurry`` is set."""
    num_running = sum(service.num_running for service in services)
    if not num_running:
        return
    logger.info("draining: %d background responses and batches are running", num_running)
    draining = asyncio.gather(*(service.drain() for service in services))
    hurry = asyncio.create_task(stop.hurry.wait())
    await asyncio.wait((draining, hurry), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    await end_tasks(draining, hurry)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
