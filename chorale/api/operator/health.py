"""/health, /ready, /ping, /version, /load and /metrics, for probes, load balancers and dashboards."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response

from chorale.api.http.responses import json_response
from chorale.api.state import ServerState
from chorale.api.telemetry.metrics import CONTENT_TYPE
from chorale.store.protocol import StoreError
from chorale.version import __version__

_STORE_SECONDS = 1.0  # limit for reading the store's sizes; after it, a scrape shows the previous ones


async def health(state: ServerState, request: Request) -> Response:
    """Returns 200 while an engine works, even during the drain; otherwise 503 with the reason.

    The body of a 200 is empty with one engine, and lists the engines if there are several.
    """
    if state.client.status.state in ("ready", "draining"):
        return _available(state)
    return _unavailable(state)


async def ready(state: ServerState, request: Request) -> Response:
    """Like /health, but returns 503 once the server drains, so that load balancers choose another server."""
    if state.client.status.state == "ready" and not state.lifecycle.draining:
        return _available(state)
    return _unavailable(state)


def _available(state: ServerState) -> Response:
    engines = _engines(state)
    return json_response({"status": state.client.status.state, "engines": engines}) if engines else Response()


def _engines(state: ServerState) -> list[dict[str, object]]:
    """Returns the state of each engine, with the reason if it does not serve. Empty for a single engine."""
    engines = state.client.engines
    if len(engines) == 1:
        return []
    found: list[dict[str, object]] = []
    for index, engine in enumerate(engines):
        status, more = engine.status, dict[str, object]()
        if status.state not in ("ready", "draining"):
            more = {"phase": status.phase, "progress": status.progress, "message": status.message}
        found.append({"engine": str(index), "status": status.state, **more})
    return found


def _unavailable(state: ServerState) -> Response:
    status = state.client.status
    name = "draining" if state.lifecycle.draining and status.state == "ready" else status.state
    body: dict[str, object] = {
        "status": name, "phase": status.phase, "progress": status.progress, "message": status.message,
    }  # fmt: skip
    if engines := _engines(state):
        body["engines"] = engines
    # "failed" is permanent, so there is no Retry-After.
    return json_response(body, 503, None if name == "failed" else {"retry-after": "1"})


async def version(state: ServerState, request: Request) -> Response:
    return json_response({"version": __version__})


async def load(state: ServerState, request: Request) -> Response:
    """Returns the number of HTTP requests in progress, without this one."""
    return json_response({"server_load": state.lifecycle.num_requests - 1})


async def metrics(state: ServerState, request: Request) -> Response:
    with contextlib.suppress(StoreError, TimeoutError):  # a failing disk must not fail the scrape
        async with asyncio.timeout(_STORE_SECONDS):
            stats = await state.store.stats()
            batches = await state.store.batches.stats() if state.batches is not None else None
        state.metrics.stored(stats)
        if batches is not None:
            state.metrics.batches_stored(batches)
    state.metrics.store_works(state.store.fault is None)
    return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE})
