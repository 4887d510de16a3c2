"""create_app: all routes, with authentication and middleware, on Starlette's router."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import cast

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

from chorale.api import batches, chat, completions, conversations, files, messages, openapi, responses, tokens
from chorale.api.http.auth import CALLER, authenticate_routes
from chorale.api.http.middleware import HttpMiddleware, Layer, Routes
from chorale.api.operator import (
    adapters,
    admin,
    docs,
    health,
    invocations,
    models,
    page,
    render,
    tokenize,
    tokenizer_info,
)
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
    client = MeteredClient(state.client, state.metrics, lambda: state.owner(CALLER.get()))
    metered = replace(state, client=cast("EngineClient", client))
    hashes = tuple(api_key_hashes)
    routes = authenticate_routes(all_routes(metered, batches, has_keys=bool(hashes)), hashes)
    return HttpMiddleware(Routes(routes), metered, bool(hashes), _cors(state))


def all_routes(
    state: ServerState, service: BatchService | None = None, *, has_keys: bool = False
) -> list[BaseRoute]:
    """Returns all routes in matching order. A test compares them with the OpenAPI operations."""
    return [
        *render.routes(state),  # these two first, else "render" would match as a completion id
        *tokens.routes(state),
        *chat.routes(state),
        *completions.routes(state),
        *messages.routes(state),
        *invocations.routes(state),
        *responses.routes(state),
        *conversations.routes(state),
        *files.routes(state, service),
        *batches.routes(state, service),
        *health.routes(state, counts_batches=service is not None),
        *admin.routes(state, has_keys=has_keys),
        *models.routes(state),
        *adapters.routes(state),
        *tokenize.routes(state),
        *tokenizer_info.routes(state),
        *openapi.routes(state),
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
