"""Chat Completions: request model, messages to harmony, chunks and body of the one event stream."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorale.api.chat.endpoint import create
from chorale.api.state import ServerState

__all__ = ["create", "routes"]


def routes(state: ServerState) -> list[Route]:
    async def handle(request: Request) -> Response:
        return await create(state, request)

    return [Route("/v1/chat/completions", handle, methods=["POST"])]
