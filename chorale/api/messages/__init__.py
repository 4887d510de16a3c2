"""/v1/messages: Anthropic's API. Converts blocks to harmony, and the event stream to blocks."""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from chorale.api.messages.endpoint import count_tokens, create
from chorale.api.state import ServerState

__all__ = ["routes"]


def routes(state: ServerState) -> list[Route]:
    return [
        Route("/v1/messages", partial(create, state), methods=["POST"]),
        Route("/v1/messages/count_tokens", partial(count_tokens, state), methods=["POST"]),
    ]
