"""Services for ``serve_app``: background work of a server process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from chorale.api.state import ServerState
from chorale.api.telemetry.metrics import Metrics
from chorale.jobs.background import Resumer

logger = logging.getLogger(__name__)

_SHARE_SECONDS = 1.0  # interval of writing the metrics


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
    """The background responses of this process, including those that it takes over from others."""

    def __init__(self, state: ServerState, resumer: Resumer) -> None:
        self._background, self._store, self._resumer = state.background, state.store, resumer

    @property
    def num_running(self) -> int:
        return self._background.num_running

    async def run(self) -> None:
        await self._background.watch(self._store, self._resumer)

    def leave(self) -> None:
        """Does nothing: requests that are still accepted may start background responses."""

    async def drain(self) -> None:
        await self._background.drain()

    async def put_back(self) -> None:
        await self._background.put_back(self._store)

    async def close(self) -> None:
        await self._background.close(self._store)


async def share_metrics(metrics: Metrics) -> None:
    """Writes the metrics of this process for the other processes, until cancelled."""
    while True:
        try:
            metrics.save()
        except OSError as error:  # for example a full disk: other processes then show older values
            logger.warning("the metrics could not be shared between API processes: %s", error)
        await asyncio.sleep(_SHARE_SECONDS)
