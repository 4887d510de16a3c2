"""Opens and serves the app for an engine client, in an API process or in the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from chorale.api.adapters import AdapterRegistry
from chorale.api.app import create_app
from chorale.api.batches.lines import make_runner
from chorale.api.http.middleware import HttpMiddleware
from chorale.api.listening import Stop
from chorale.api.responses.background.recovery import recovery
from chorale.api.responses.background.resume import Resumer
from chorale.api.state import ServerState
from chorale.api.telemetry.metrics import Metrics
from chorale.api.telemetry.throughput import log_throughput
from chorale.client.base import EngineClient
from chorale.client.fleet.fixed_members import FixedFleet
from chorale.client.remote import RemoteClient
from chorale.config.engine import ServerConfig
from chorale.errors import ConfigError
from chorale.harmony.vocab import Vocabulary, VocabularyError, load_vocabulary
from chorale.jobs.background import Background
from chorale.jobs.leases import Service
from chorale.jobs.service import open_service
from chorale.machine.processes import quiet_collector
from chorale.serve.bootstrap import ApiStart
from chorale.serve.http.server import serve_app
from chorale.store.store import ResponseStore, StoreError, open_store
from chorale.tools.contract import ToolService
from chorale.tools.service import start_tools
from chorale.tracing.otel import open_tracer

logger = logging.getLogger(__name__)

# Thresholds of the garbage collector. Requests leave reference cycles, and collecting 50,000 objects blocks
# the event loop for 30 to 70 ms.
COLLECTOR = (10_000, 20, 100)
_SHARE_SECONDS = 1.0  # interval of writing the metrics


def make_client(start: ApiStart) -> RemoteClient | FixedFleet:
    """Returns a client. Each API process may queue its share of the server's limits."""
    queue = start.server  # its limits
    if not start.engine_directories:
        return RemoteClient(start.directory, queue=queue)
    return FixedFleet(
        start.engine_directories,
        queue=queue,
        seeds=random.Random(f"{start.seed} {start.process}"),
        first_slot=start.process,
    )


async def serve_http(client: EngineClient, start: ApiStart, sockets: list[socket.socket], stop: Stop) -> None:
    """Serves until ``stop`` or a failure, then drains. The caller closes ``client``."""
    async with opened_app(client, start) as (app, services):
        await serve_app(app, start.server, services, sockets, stop)


@contextlib.asynccontextmanager
async def opened_app(
    client: EngineClient, start: ApiStart
) -> AsyncIterator[tuple[HttpMiddleware, list[Service]]]:
    """Yields the app, and the services to run along with it. Opens the tools and the store.

    While the app is open, the garbage collector runs rarely and skips the objects that exist already. Raises
    ``ConfigError`` if the tools, the store or the storage of files cannot be opened.
    """
    try:
        vocab = await asyncio.to_thread(_load_vocabulary)
    except VocabularyError as fault:
        raise ConfigError(str(fault)) from fault
    tools = await start_tools(start.server.tools, os.environ, lambda text: len(vocab.encode(text)))
    for name, reason in tools.missing.items():
        logger.warning("the tool %s is not available: %s", name, reason)
    state = await asyncio.to_thread(_make_state, client, start, vocab, tools)  # opens the store
    try:
        batches = await asyncio.to_thread(open_service, start.server, state.store)
        app = create_app(state, batches, start.api_key_hashes)
        with quiet_collector(COLLECTOR):
            yield app, make_services(app.state)
    finally:
        await tools.aclose()
        await state.store.close()
        if state.tracer is not None:
            await asyncio.to_thread(state.tracer.close)


def make_services(state: ServerState) -> list[Service]:
    """Returns the services of this process."""
    config = state.config
    state.background.resumer = Resumer(state)
    services: list[Service] = [Endless(lambda: share_metrics(state.metrics)), state.background]
    if state.batches is not None:
        services.insert(0, make_runner(state))
    # Only one process logs the throughput, as each process sees that of all.
    if not config.disable_log_stats and state.metrics.process == 0:
        services.append(Endless(lambda: log_throughput(state.client, config.log_stats_interval)))
    return services


def _load_vocabulary() -> Vocabulary:
    """Returns the vocabulary, after building its lazy tables, which would hold the GIL during a request."""
    vocab = load_vocabulary()
    vocab.encode("")
    return vocab


def _make_state(client: EngineClient, start: ApiStart, vocab: Vocabulary, tools: ToolService) -> ServerState:
    names = start.server.served_model_names or (start.model,)
    store = _open_store(start.server, vocab)
    log_stats = not start.server.disable_log_stats
    share = Path(start.directory) if start.server.api_server_count > 1 else None
    return ServerState(
        client=client,
        config=start.server,
        vocab=vocab,
        tools=tools,
        metrics=Metrics(
            names[0],
            process=start.process,
            share=share,
            log_stats=log_stats,
            buckets=start.server.histogram_buckets,
        ),
        store=store,
        model_names=names,
        background=Background(store),
        adapters=AdapterRegistry(start.server.lora_modules),
        tracer=open_tracer(start.server.otlp_traces_endpoint, f"api-{start.process}"),
    )


def _open_store(config: ServerConfig, vocab: Vocabulary) -> ResponseStore:
    """Opens the store. Raises ``ConfigError``, as the operator has to fix errors at start-up."""
    try:
        return open_store(config, recovery(vocab))
    except StoreError as error:
        raise ConfigError(str(error)) from error


class Endless(Service):
    """A service with nothing to drain."""

    def __init__(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._run = run

    async def run(self) -> None:
        await self._run()


async def share_metrics(metrics: Metrics) -> None:
    """Writes the metrics of this process for the other processes, until cancelled."""
    while True:
        try:
            metrics.save()
        except OSError as error:  # for example a full disk: other processes then show older values
            logger.warning("the metrics could not be shared between API processes: %s", error)
        await asyncio.sleep(_SHARE_SECONDS)
