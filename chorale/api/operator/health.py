"""/health, /ready, /ping, /version, /load and /metrics, for probes, load balancers and dashboards."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorale.api.http.responses import json_response
from chorale.api.operator.metrics import CONTENT_TYPE
from chorale.api.state import ServerState
from chorale.store.protocol import StoreError
from chorale.version import __version__

_STORE_SECONDS = 1.0  # time limit for the store's sizes in a scrape, which otherwise shows the previous ones


def routes(state: ServerState) -> list[Route]:
    return [
        Route("/health", partial(health, state)),
        Route("/ready", partial(ready, state)),
        Route("/ping", partial(health, state), methods=["GET", "POST"]),
        Route("/version", version),
        Route("/load", partial(load, state)),
        Route("/metrics", partial(metrics, state)),
    ]


async def health(state: ServerState, request: Request) -> Response:
    """Returns 200 with an empty body while the engine works, even during the drain; otherwise 503 with the
    reason.
    """
    if state.client.status.state in ("ready", "draining"):
        return Response(status_code=200)
    return _unavailable(state)


async def ready(state: ServerState, request: Request) -> Response:
    """Like /health, but returns 503 once the server drains, so that load balancers choose another server."""
    if state.client.status.state == "ready" and not state.lifecycle.draining:
        return Response(status_code=200)
    return _unavailable(state)


def _unavailable(state: ServerState) -> Response:
    status = state.client.status
    name = "draining" if state.lifecycle.draining and status.state == "ready" else status.state
    body = {"status": name, "phase": status.phase, "progress": status.progress, "message": status.message}
    # "failed" is permanent, so there is no Retry-After.
    return json_response(body, 503, None if name == "failed" else {"retry-after": "1"})


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


async def load(state: ServerState, request: Request) -> Response:
    """Returns the number of HTTP requests in progress, without this one."""
    return json_response({"server_load": state.lifecycle.num_requests - 1})


async def metrics(state: ServerState, request: Request) -> Response:
    with contextlib.suppress(StoreError, TimeoutError):  # a failing disk must not fail the scrape
        async with asyncio.timeout(_STORE_SECONDS):
            stats = await state.store.stats()
        state.metrics.stored(stats)
    state.metrics.store_works(state.store.fault is None)
    return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE})
