"""JobFrontend: runs a job that calls the app in this process, instead of an HTTP server."""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Protocol

from chorale.client.fleet.fixed_members import FixedFleet
from chorale.client.remote import RemoteClient
from chorale.errors import EngineLoadingError
from chorale.serve.bootstrap import ApiStart

if TYPE_CHECKING:
    from chorale.api.http.middleware import HttpMiddleware
    from chorale.api.listening import Stop

_POLL_SECONDS = 0.05  # interval of checking whether the engine is ready


class Job(Protocol):
    """Work with the app. ``run`` is called once the engine is ready; when it returns, the engine ends."""

    async def run(self, app: HttpMiddleware) -> None: ...

    def stop(self) -> None:
        """First call: lets running requests finish. Second call: cancels them."""
        ...


class JobFrontend:
    """The supervisor's ``HttpFrontend`` for a job."""

    def __init__(self, start: ApiStart, stop: Stop, job: Job) -> None:
        self._start, self._stop, self._job = start, stop, job
        self._client: RemoteClient | FixedFleet | None = None
        self._draining = False

    async def run(self) -> None:
        # Imported late, so that the engine process starts first.
        http = await asyncio.to_thread(importlib.import_module, "chorale.serve.http.app")
        server = await asyncio.to_thread(importlib.import_module, "chorale.serve.http.server")
        self._client = client = http.make_client(self._start)
        client.start()
        try:
            async with (
                http.opened_app(client, self._start) as (app, services),
                server.attended(app, services),
            ):
                if await self._ready(client):
                    await self._job.run(app)
        finally:
            await client.close()
        self._stop()

    async def _ready(self, client: RemoteClient | FixedFleet) -> bool:
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

    def fail(self, message: str) -> None:
        if self._client is not None:
            self._client.mark_failed(message)
