"""Front: the deployment that serves HTTP. Each replica runs the whole app, but no engine and no torch."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from dataclasses import replace

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from chorale.api.http.middleware import HttpMiddleware
from chorale.client.fleet.fleet import FleetClient
from chorale.serve.bootstrap import ApiStart
from chorale.serve.fleet.assigner import ASSIGNERS, RayAssigner
from chorale.serve.fleet.export import export_forever
from chorale.serve.http.app import opened_app
from chorale.serve.http.server import attended
from chorale.serve.logs import configure_logging


class Front:
    """A front replica. Ray creates it, passes it requests from its proxies, drains it and destroys it."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, engine: DeploymentHandle, start: ApiStart
    ) -> None:
        configure_logging(start.log, "front")
        self._start, self._engine = start, engine
        self._stack = contextlib.AsyncExitStack()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        try:
            return _WithLifespan(await self._open())
        except BaseException:
            await self._stack.aclose()
            raise

    async def _open(self) -> HttpMiddleware:
        handle, server = self._engine, self._start.server
        client = FleetClient(
            functools.partial(RayAssigner, handle),
            queue=replace(server, api_server_count=1),
            patience=server.ray_assign_timeout,
            most_moves=server.ray_max_moves,
        )
        assigner = client.assigner
        assert isinstance(assigner, RayAssigner)
        ASSIGNERS[handle.app_name, handle.deployment_name] = assigner
        assigner.start()
        client.start()
        self._stack.push_async_callback(assigner.close)
        self._stack.push_async_callback(client.close)
        # The router has to run on this event loop, like the fleet, and not in a thread of Ray.
        handle._init(_run_router_in_separate_loop=False)
        app, services = await self._stack.enter_async_context(opened_app(client, self._start))
        await self._stack.enter_async_context(attended(app, services))
        exporter = asyncio.get_running_loop().create_task(export_forever(app.state.metrics.collect_requests))
        self._stack.callback(exporter.cancel)
        return app

    async def check_health(self) -> None:
        """Passes whenever the event loop runs; a front has nothing else to check."""

    async def __del__(self) -> None:
        """Closes the app. Ray calls it after draining, or if draining takes too long."""
        stack = getattr(self, "_stack", None)
        if stack is not None:
            await stack.aclose()


class _WithLifespan:
    """Answers the lifespan messages that Ray sends, and does nothing: ``Front`` opens and closes the app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
