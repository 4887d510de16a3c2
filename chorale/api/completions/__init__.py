"""Completions: raw prompts (text or token ids) to raw text, without harmony parsing."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chorale.api.completions.endpoint import create
from chorale.api.state import ServerState

__all__ = ["create", "routes"]


def routes(state: ServerState) -> list[Route]:
    async def handle(request: Request) -> Response:
        return await create(state, request)

    return [Route("/v1/completions", handle, methods=["POST"])]
