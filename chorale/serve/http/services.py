"""The work beside the requests of a server process, as services of ``serve_app``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from chorale.api.batches.lines import make_runner
from chorale.api.responses.background.resume import Resumer
from chorale.api.state import ServerState
from chorale.api.telemetry.metrics import Metrics
from chorale.api.telemetry.throughput import log_throughput
from chorale.jobs.service import BatchService
from chorale.serve.http.server import Service

logger = logging.getLogger(__name__)

_SHARE_SECONDS = 1.0


def make_services(state: ServerState, batches: BatchService | None) -> list[Service]:
    """Returns the services of this process. ``state``: the app's; ``batches``: None if it keeps no files."""
    config = state.config
    services: list[Service] = [Endless(lambda: share_metrics(state.metrics)), BackgroundResponses(state)]
    if batches is not None:
        services.insert(0, make_runner(state, batches))
    # One process logs for all: each sees the whole engine.
    if not config.disable_log_stats and state.metrics.process == 0:
        services.append(Endless(lambda: log_throughput(state.client, config.log_stats_interval)))
    return services


class Endless:
    """A service with nothing to drain."""

    num_running = 0

    def __init__(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.run = run

    def leave(self) -> None: ...

    async def drain(self) -> None: ...

    async def put_back(self) -> None: ...

    async def close(self) -> None: ...


class BackgroundResponses:
    """The background responses of this process, with those that it takes over from others."""

    def __init__(self, state: ServerState) -> None:
        self._background, self._store = state.background, state.store
        self._resumer = Resumer(state)

    @property
    def num_running(self) -> int:
        return self._background.num_running

    async def run(self) -> None:
        await self._background.watch(self._store, self._resumer)

    def leave(self) -> None:
        """Does nothing: requests that are still accepted may begin more."""

    async def drain(self) -> None:
        await self._background.drain()

    async def put_back(self) -> None:
        await self._background.put_back(self._store)

    async def close(self) -> None:
        await self._background.close(self._store)


async def share_metrics(metrics: Metrics) -> None:
    """Shows this process's metrics to the others, until cancelled."""
    while True:
        try:
            metrics.save()
        except OSError as error:  # a full disk: scrapes of other processes show older numbers
            logger.warning("the metrics could not be shared: %s", error)
        await asyncio.sleep(_SHARE_SECONDS)
