"""create_app: all routes, with authentication and middleware, on Starlette's router."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import cast

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

from chorale.api import openapi
from chorale.api.http.auth import CALLER, authenticate_routes
from chorale.api.http.middleware import HttpMiddleware, Layer, Routes
from chorale.api.operations import OPERATIONS, operation_routes
from chorale.api.operator import docs, page, tokenizer_info
from chorale.api.responses.websocket import socket
from chorale.api.state import ServerState
from chorale.api.telemetry.metered_client import MeteredClient
from chorale.client.base import EngineClient
from chorale.jobs.service import BatchService
from chorale.tracing.ignored import HEADER


def create_app(
    state: ServerState, batches: BatchService | None = None, api_key_hashes: Iterable[bytes] = ()
) -> HttpMiddleware:
    """Builds the ASGI app of all endpoints.

    ``batches``: None if the server keeps no files. ``api_key_hashes``: ``hash_key`` of each key; without any,
    no key is required. Endpoints receive the engine client wrapped in a ``MeteredClient``.
    """
    state.metrics.watch(state.client)
    hashes = tuple(api_key_hashes)
    client = MeteredClient(state.client, state.metrics, lambda: state.owner(CALLER.get()))
    metered = replace(state, client=cast("EngineClient", client), batches=batches, has_keys=bool(hashes))
    routes = authenticate_routes(all_routes(metered), hashes)
    return HttpMiddleware(Routes(routes), metered, _cors(state))


def all_routes(state: ServerState) -> list[BaseRoute]:
    """Returns all routes in matching order."""
    return [
        *operation_routes(state),
        *socket.routes(state),
        *tokenizer_info.routes(state),
        *openapi.routes(state, OPERATIONS),
        *docs.routes(state),
        *page.routes(state),
    ]


def _cors(state: ServerState) -> Layer | None:
    """Returns the CORS layer, or None if the operator allows no origin."""
    config = state.config
    if not config.allowed_origins:
        return None
    return partial(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=("x-request-id", "request-id", "retry-after", "openai-processing-ms", HEADER),
    )
