"""/v1/responses: request, conversation, events, store."""

from starlette.routing import BaseRoute

from chorale.api.responses import endpoint
from chorale.api.responses.websocket import socket
from chorale.api.state import ServerState

__all__ = ["routes"]


def routes(state: ServerState) -> list[BaseRoute]:
    return [*endpoint.routes(state), *socket.routes(state)]
